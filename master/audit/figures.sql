-- The figures of an audit: (figure, stream, value).
SELECT 'executions' AS figure, '' AS stream, CAST(count(id) AS BIGINT) AS value FROM runs
UNION ALL SELECT 'pending', '', CAST(coalesce(sum(n), 0) AS BIGINT) FROM held
UNION ALL SELECT 'oldest_age_ms', '', max(age_ms) FROM held
UNION ALL SELECT 'before_known', o.stream, count(*) FROM odd o WHERE kind IN ('lost', 'no_letter') AND ms <= known_ms GROUP BY o.stream
UNION ALL SELECT 'maybe_dropped', o.stream, count(*) FROM odd o ANTI JOIN again a ON a.stream = o.stream AND a.id = o.id
  WHERE kind IN ('lost', 'no_letter', 'passed') AND (ms > known_ms OR kind = 'passed') AND ms <= drop_ms GROUP BY o.stream
UNION ALL SELECT 'maybe_damaged', o.stream, count(*) FROM odd o ANTI JOIN again a ON a.stream = o.stream AND a.id = o.id
  WHERE kind = 'lost' AND ms > known_ms AND ms > drop_ms AND ms <= damaged_ms GROUP BY o.stream
UNION ALL SELECT 'skipped_order', p.stream, count(*) FROM late p JOIN known k ON k.stream = p.stream
  WHERE p.turn = 1 AND p.ms <= k.order_floor_ms GROUP BY p.stream
