-- bad (again): An entry is in the record of one ticket.
-- means: Two tickets claim it: the other one's later entries wait for what is not theirs.
-- repair: The leader mends this by itself within seconds (`usher status`: is there one?); if it stays, restart it.
SELECT stream, id, min(ticket) AS ticket, min(owner) AS owner, concat('also in the record of ', max(ticket)) AS detail
  FROM tickets t SEMI JOIN unlike u ON u.nth = t.nth AND u.stream = t.stream GROUP BY stream, id HAVING min(ticket) <> max(ticket)
