-- bad (again), No leader: An entry that an incarnation has pending is in its ticket's record (tickets index).
-- means: It has an owner, but the master does not know that its ticket is in processing: a later one could overtake it.
-- repair: The leader mends this by itself within seconds (`usher status`: is there one?); if it stays, restart it.
SELECT i.stream, i.id, i.ticket, i.consumer AS owner, i.detail
  FROM indexed i ANTI JOIN (SELECT t.* FROM tickets t SEMI JOIN indexed j ON j.ticket = t.ticket AND j.stream = t.stream) t
    ON t.stream = i.stream AND t.ticket = i.ticket AND (t.id = i.id OR t.id IS NULL)
 WHERE i.kind = 'pending_without_index'
