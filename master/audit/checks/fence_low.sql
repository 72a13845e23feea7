-- bad (again): The fencing token of a ticket is not lower than one under which it has run.
-- means: The record's fencing token is lower than one that sinks have seen: they refuse what its owner does now.
-- repair: Redis restored from a copy, or the record written by hand? Restart the owner: its tickets get new tokens.
SELECT t.stream, min(t.id) AS id, t.ticket, min(t.owner) AS owner,
       concat('fencing token ', min(t.fence), '; it ran under ', max(r.fence)) AS detail
  FROM tickets t JOIN (SELECT ticket, stream, max(fence) AS fence FROM runs WHERE id IS NOT NULL GROUP BY ticket, stream) r
    ON r.ticket = t.ticket AND r.stream = t.stream
 WHERE t.fence < r.fence AND contains(t.owner, ':') AND NOT contains(t.ticket, '�') GROUP BY t.stream, t.ticket
