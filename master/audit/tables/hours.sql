-- How many handlers ran at a time, on average, in each hour of UTC; an execution counts where it began.
SELECT stream, substr(at_utc(hour * 3600000000), 1, 13) AS hour, count(*) AS executions,
       CAST(coalesce(sum(run_us), 0) / 3.6e9 AS DOUBLE) AS busy
  FROM events WHERE outcome <> 'letter' GROUP BY stream, hour
