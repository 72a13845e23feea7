-- Day -1 is all of them.
SELECT stream, coalesce(day, -1) AS day, dim, name, sum(CASE WHEN outcome <> 'letter' THEN 1 ELSE 0 END) AS executions,
       sum(CASE WHEN outcome = 'done' THEN 1 ELSE 0 END) AS done,
       sum(CASE WHEN outcome IN ('failed', 'crashed', 'gave_up') THEN 1 ELSE 0 END) AS failed,
       sum(CASE WHEN attempt > 1 THEN 1 ELSE 0 END) AS retries,
       sum(CASE WHEN outcome = 'letter' THEN 1 ELSE 0 END) AS letters, coalesce(sum(run_us), 0) / 1e6 AS worker_s
  FROM worked WHERE name IS NOT NULL GROUP BY GROUPING SETS ((stream, day, dim, name), (stream, dim, name))
