-- `events`, once for all of them and once for each dimension.
SELECT stream, day, dim, outcome, attempt, wait_us, run_us,
       CASE dim WHEN 'ticket' THEN ticket WHEN 'tenant' THEN tenant WHEN 'handler' THEN handler
                WHEN 'consumer' THEN consumer ELSE '' END AS name
  FROM events CROSS JOIN (VALUES ('all'), ('ticket'), ('tenant'), ('handler'), ('consumer')) d(dim)
