-- warn
-- rule: An entry is delivered a few times at most.
-- means: It has changed hands again and again: its handler may kill its consumers.
-- look: redis-cli XPENDING {stream} {group} {id} {id} 1
-- look: redis-cli XRANGE {stream} {id} {id}
-- look: redis-cli HGET {prefix}attempts {id}
-- repair: Look at the message; `usher dead` lists those that were given up.
SELECT e.stream, e.id, e.ticket, e.consumer AS owner,
       concat('pending for ', e.consumer, ', idle ', e.idle_ms, ' ms, deliveries ', e.deliveries) AS detail
  FROM entries e CROSS JOIN limits l WHERE e.deliveries > l.deliveries
