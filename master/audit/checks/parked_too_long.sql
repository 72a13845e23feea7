-- warn (again), Nothing moves: An entry waits under `master` only while its ticket is in processing, held by a rule, or no consumer has room.
-- means: Nothing of its ticket is in processing, and no rule holds it back: no consumer has room, or it was forgotten.
-- repair: Start consumers. Have some room? Then restart the leader: it reads all that is pending under `master`.
SELECT p.stream, p.id, p.ticket, p.consumer AS owner, concat('waiting for ', p.idle_ms, ' ms') AS detail FROM marked p CROSS JOIN limits l
  ANTI JOIN (SELECT t.stream, t.ticket FROM tickets t SEMI JOIN marked q ON q.ticket = t.ticket AND q.stream = t.stream) t
    ON t.stream = p.stream AND t.ticket = p.ticket
 WHERE p.consumer = 'master' AND p.idle_ms > l.parked_ms AND p.in_stream
