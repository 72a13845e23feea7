-- How many handlers ran at a time, on average, in each hour of UTC; an execution counts where it began.
SELECT stream, concat(CAST(DATE '1970-01-01' + CAST(floor(hour / 24) AS INT) AS STRING), ' ',
                      lpad(CAST(hour % 24 AS STRING), 2, '0')) AS hour, count(*) AS executions,
       CAST(coalesce(sum(run_us), 0) / 3.6e9 AS DOUBLE) AS busy
  FROM events WHERE outcome <> 'letter' GROUP BY stream, hour
