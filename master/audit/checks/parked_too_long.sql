-- warn, Nothing moves: An entry waits under `master` only while its ticket is in processing, held by a rule, or no consumer has room.
-- means: Nothing of its ticket is in processing, and no rule holds it back: no consumer has room, or it was forgotten.
-- repair: Start consumers. Have some room? Then restart the leader: it reads all that is pending under `master`.
SELECT e.stream, e.id, e.ticket, e.consumer AS owner, concat('waiting for ', e.idle_ms, ' ms') AS detail
  FROM entries e CROSS JOIN limits l ANTI JOIN tickets t ON t.stream = e.stream AND t.ticket = e.ticket
 WHERE e.consumer = 'master' AND e.idle_ms > l.parked_ms AND e.in_stream
