-- Waits until the first start, and run times: how many lie in each 32nd of an octave of microseconds, which is 2 %. So those of days add up, and no time
-- is kept.
SELECT stream, day, dim, name, what, CAST(floor(32 * log2(us + 1)) AS BIGINT) AS place, count(*) AS n FROM (
  SELECT stream, day, dim, name, 'wait' AS what, wait_us AS us FROM worked WHERE wait_us IS NOT NULL
  UNION ALL SELECT stream, day, dim, name, 'run', run_us FROM worked WHERE run_us IS NOT NULL
) t WHERE name IS NOT NULL GROUP BY stream, day, dim, name, what, place
