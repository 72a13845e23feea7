-- The report: by day (of UTC; '' is all of them), dimension and name. Times in milliseconds.
WITH placed AS (
  SELECT *, (pow(2, (place + 0.5) / 32) - 1) / 1000 AS ms,
         sum(n) OVER (PARTITION BY stream, day, dim, name, what ORDER BY place) AS upto,
         sum(n) OVER (PARTITION BY stream, day, dim, name, what) AS total
    FROM spread
), marks AS (
  SELECT stream, day, dim, name,
         min(CASE WHEN what = 'wait' AND upto >= 0.50 * total THEN ms END) AS wait_p50_ms,
         min(CASE WHEN what = 'wait' AND upto >= 0.95 * total THEN ms END) AS wait_p95_ms,
         min(CASE WHEN what = 'wait' AND upto >= 0.99 * total THEN ms END) AS wait_p99_ms,
         min(CASE WHEN what = 'run' AND upto >= 0.50 * total THEN ms END) AS run_p50_ms,
         min(CASE WHEN what = 'run' AND upto >= 0.95 * total THEN ms END) AS run_p95_ms,
         min(CASE WHEN what = 'run' AND upto >= 0.99 * total THEN ms END) AS run_p99_ms
    FROM placed GROUP BY stream, day, dim, name
)
SELECT c.stream, CASE WHEN c.day < 0 THEN '' ELSE CAST(DATE '1970-01-01' + CAST(c.day AS INT) AS STRING) END AS day, c.dim, c.name,
       CAST(executions AS BIGINT) AS executions, CAST(done AS BIGINT) AS done, CAST(failed AS BIGINT) AS failed,
       CAST(retries AS BIGINT) AS retries, CAST(letters AS BIGINT) AS letters, CAST(worker_s AS DOUBLE) AS worker_s,
       wait_p50_ms, wait_p95_ms, wait_p99_ms, run_p50_ms, run_p95_ms, run_p99_ms
  FROM measured c LEFT JOIN marks m ON c.stream = m.stream AND c.day = m.day AND c.dim = m.dim AND c.name = m.name
