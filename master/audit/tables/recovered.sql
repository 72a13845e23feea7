-- Messages that began again under a new owner: how long after the last sign of life of the owner that was lost, which is
-- what it recorded last, or else the start that was interrupted. Crashes are recorded by others.
SELECT r.stream, r.id, (r.start_us - greatest(r.began_us, CASE WHEN a.alive_ms * 1000 < r.start_us THEN a.alive_ms * 1000 END)) / 1000.0 AS ms
  FROM (SELECT *, lag(consumer) OVER turn AS lost, lag(start_us) OVER turn AS began_us, lag(fence) OVER turn AS fence_before
          FROM repeats WINDOW turn AS (PARTITION BY stream, ticket, id ORDER BY fence, start_us)) r
  LEFT JOIN (SELECT stream, consumer, max(record_ms) AS alive_ms FROM runs WHERE outcome <> 'crashed' GROUP BY stream, consumer) a
    ON a.stream = r.stream AND a.consumer = r.lost
 WHERE r.fence_before < r.fence
