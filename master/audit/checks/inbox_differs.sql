-- bad
-- rule: What an inbox hands over is in the record of its ticket, under that fencing token or a later one.
-- means: The inbox names what its owner was not given: it runs what another one may have, or what nobody was given.
-- repair: Did another program write to the inbox? Restart that consumer.
WITH told AS (SELECT stream, owner, ticket, id, nth, fence FROM inboxes WHERE id IS NOT NULL),
record AS (SELECT stream, ticket, max(fence) AS fence, max(owner) AS owner FROM tickets GROUP BY stream, ticket)
SELECT t.stream, t.id, t.ticket, t.owner,
       concat('its ticket is under fencing token ', r.fence, '; told under ', t.fence) AS detail
  FROM told t JOIN record r ON r.stream = t.stream AND r.ticket = t.ticket WHERE r.owner <> t.owner AND r.fence < t.fence
UNION ALL
SELECT t.stream, t.id, t.ticket, t.owner, concat('the group has not read it; told under ', t.fence)
  FROM told t JOIN known k ON k.stream = t.stream WHERE t.nth > k.delivered_nth
UNION ALL
SELECT t.stream, t.id, t.ticket, t.owner, concat('it waits, and its ticket has no record; told under ', t.fence)
  FROM told t JOIN known k ON k.stream = t.stream
  JOIN entries e ON e.stream = t.stream AND e.id = t.id AND e.consumer = 'master' AND e.ms > k.floor_ms
  ANTI JOIN record r ON r.stream = t.stream AND r.ticket = t.ticket
  ANTI JOIN ids i ON i.stream = t.stream AND i.id = t.id
 WHERE (t.fence >> 10) < k.began_ms
