-- Messages that succeeded again when Redis knew of a success, and whether a master had declared that they may: a success leaves the pending list in the
-- step that records it. A former owner's may come behind its successor's.
WITH pairs AS (SELECT d.stream, d.id, d.ticket, d.nth, d.consumer, d.ran, d.record_ms, d.rec, d.n, f.rec AS first_rec, f.record_ms AS noted_ms,
         least(least(f.record_ms, 4398046511103) * 1024, f.fence) AS begun, f.ran AS first_ran
    FROM suspects d JOIN suspects f ON f.stream = d.stream AND f.ticket = d.ticket AND f.id = d.id
   WHERE d.outcome = 'done' AND f.outcome = 'done' AND (f.rec < d.rec OR (f.rec = d.rec AND f.n < d.n)) AND f.fence <= d.fence),
wrong AS (
  SELECT stream, id, ticket, nth, consumer, ran, record_ms, rec, n, max(begun) AS begun, min(noted_ms) AS noted_ms,
         min_by(first_ran, first_rec) AS first_ran
    FROM pairs GROUP BY stream, id, ticket, nth, consumer, ran, record_ms, rec, n)
SELECT w.stream, w.id, w.ticket, w.consumer, w.record_ms, w.rec, w.n, max(d.at_ms) IS NOT NULL AS is_declared,
       concat(w.ran, '; ', replace(replace(w.first_ran, ' ran it ', ' had done it '), ' (UTC)', ''), ', as the run log noted at ',
              at_utc(w.noted_ms * 1000)) AS detail
  FROM wrong w LEFT JOIN declared d ON d.stream = w.stream AND w.record_ms >= d.at_ms AND w.begun <= d.at_ms * 1024
                                   AND w.nth BETWEEN d.first_nth AND d.last_nth
 GROUP BY w.stream, w.id, w.ticket, w.consumer, w.record_ms, w.rec, w.n, w.ran, w.first_ran, w.noted_ms
