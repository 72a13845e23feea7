-- What `usher report` counts: executions, and dead letters with what their last execution tells of them. Times in microseconds; null: not known.
SELECT stream, CAST(floor(start_us / 86400000000) AS BIGINT) AS day, CAST(floor(start_us / 3600000000) AS BIGINT) AS hour,
       CASE WHEN ticket <> concat('�', id) THEN ticket END AS ticket, tenant, handler, regexp_replace(consumer, ':[0-9]+$', '') AS consumer, outcome, attempt,
       CASE WHEN attempt = 1 THEN greatest(0, start_us - ms * 1000) END AS wait_us,
       CASE WHEN end_us > 0 THEN greatest(0, end_us - start_us) END AS run_us
  FROM runs WHERE id IS NOT NULL AND start_us >= {since_us}
UNION ALL
SELECT l.stream, CAST(floor(l.letter_ms / 86400000) AS BIGINT), CAST(floor(l.letter_ms / 3600000) AS BIGINT),
       l.ticket, r.tenant, r.handler, r.consumer, 'letter', 0, NULL, NULL
  FROM letters l LEFT JOIN (SELECT r.stream, r.id, max_by(r.tenant, r.start_us) AS tenant, max_by(r.handler, r.start_us) AS handler,
           max_by(regexp_replace(r.consumer, ':[0-9]+$', ''), r.start_us) AS consumer
      FROM runs r JOIN letters l ON r.stream = l.stream AND r.id = l.id GROUP BY r.stream, r.id
  ) r ON l.stream = r.stream AND l.id = r.id
 WHERE l.letter_ms * 1000 >= {since_us}
