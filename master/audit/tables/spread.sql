-- Waits until the first start, and run times: how many lie in each 32nd of an octave of microseconds, which is 2 %. So those of days add up, and no time
-- is kept. Day -1 is all of them.
SELECT stream, coalesce(day, -1) AS day, dim, name, what, place, count(*) AS n FROM (SELECT *, CAST(floor(32 * log2(us + 1)) AS BIGINT) AS place FROM (
  SELECT stream, day, dim, name, 'wait' AS what, wait_us AS us FROM worked WHERE wait_us IS NOT NULL
  UNION ALL SELECT stream, day, dim, name, 'run', run_us FROM worked WHERE run_us IS NOT NULL) u
 WHERE name IS NOT NULL) t GROUP BY GROUPING SETS ((stream, day, dim, name, what, place), (stream, dim, name, what, place))
