-- Messages that began again under a new owner, with no other one of their ticket in between: how long after the last sign
-- of life of the owner that was lost, which is what it recorded last, or else the start that was interrupted. Crashes are
-- recorded by others.
WITH moved AS (SELECT stream, ticket FROM repeats WHERE ticket <> '' GROUP BY stream, ticket, id HAVING min(fence) < max(fence)),
turns AS (
  SELECT stream, id, fence, start_us, lag(id) OVER turn AS id_before, lag(fence) OVER turn AS fence_before,
         lag(consumer) OVER turn AS lost, lag(start_us) OVER turn AS began_us
    FROM timed t SEMI JOIN moved m ON m.stream = t.stream AND m.ticket = t.ticket
  WINDOW turn AS (PARTITION BY stream, ticket ORDER BY fence, start_us, ended_us, nth, rec))
SELECT r.stream, r.id, (r.start_us - greatest(r.began_us, CASE WHEN a.alive_ms * 1000 < r.start_us THEN a.alive_ms * 1000 END)) / 1000.0 AS ms
  FROM turns r
  LEFT JOIN (SELECT stream, consumer, max(record_ms) AS alive_ms FROM runs WHERE outcome <> 'crashed' GROUP BY stream, consumer) a
    ON a.stream = r.stream AND a.consumer = r.lost
 WHERE r.id = r.id_before AND r.fence_before < r.fence
