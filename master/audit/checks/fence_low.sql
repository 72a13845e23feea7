-- bad: The fencing token of a ticket is not lower than one under which it has run.
-- means: The record's fencing token is lower than one that sinks have seen: they refuse what its owner does now.
-- repair: Redis restored from a copy, or the record written by hand? Restart the owner: its tickets get new tokens.
SELECT t.stream, t.id, t.ticket, t.owner, concat('fencing token ', t.fence, '; it ran under ', r.fence) AS detail
  FROM (SELECT stream, ticket, min(id) AS id, min(owner) AS owner, min(fence) AS fence FROM tickets
         WHERE id IS NOT NULL AND contains(owner, ':') GROUP BY stream, ticket) t
  JOIN (SELECT stream, ticket, max(fence) AS fence FROM runs WHERE id IS NOT NULL GROUP BY stream, ticket) r
    ON r.stream = t.stream AND r.ticket = t.ticket
 WHERE t.fence < r.fence AND NOT contains(t.ticket, '�')
