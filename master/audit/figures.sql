-- The figures of an audit, for its report and plots: (figure, stream, label, value).
SELECT 'executions' AS figure, '' AS stream, '' AS label, CAST(count(id) AS DOUBLE) AS value FROM runs
UNION ALL SELECT 'owner', stream, consumer, count(*) FROM entries WHERE consumer IS NOT NULL GROUP BY stream, consumer
UNION ALL
SELECT 'age', '', CASE WHEN age_ms < 1000 THEN '0' WHEN age_ms < 10000 THEN '1' WHEN age_ms < 60000 THEN '2' WHEN age_ms < 600000 THEN '3'
                       WHEN age_ms < 3600000 THEN '4' WHEN age_ms < 86400000 THEN '5' ELSE '6' END, count(*)
  FROM entries WHERE consumer IS NOT NULL GROUP BY 3
UNION ALL SELECT 'oldest_age_ms', '', '', max(age_ms) FROM entries WHERE consumer IS NOT NULL
UNION ALL
SELECT 'ticket', stream, ticket, pending FROM (
  SELECT stream, ticket, count(*) AS pending, row_number() OVER (ORDER BY count(*) DESC, stream, ticket) AS place,
         count(*) OVER () AS tickets FROM entries WHERE consumer IS NOT NULL AND ticket IS NOT NULL GROUP BY stream, ticket) t
 WHERE place <= 20
UNION ALL SELECT 'tickets_pending', '', '', count(*)
  FROM (SELECT DISTINCT stream, ticket FROM entries WHERE consumer IS NOT NULL AND ticket IS NOT NULL) t
UNION ALL SELECT 'before_known', o.stream, '', count(*) FROM odd o WHERE kind IN ('lost', 'no_letter') AND ms <= known_ms GROUP BY o.stream
UNION ALL SELECT 'maybe_dropped', o.stream, '', count(*) FROM odd o ANTI JOIN again a ON a.stream = o.stream AND a.id = o.id
  WHERE kind IN ('lost', 'no_letter', 'passed') AND (ms > known_ms OR kind = 'passed') AND ms <= drop_ms GROUP BY o.stream
UNION ALL SELECT 'maybe_damaged', o.stream, '', count(*) FROM odd o ANTI JOIN again a ON a.stream = o.stream AND a.id = o.id
  WHERE kind = 'lost' AND ms > known_ms AND ms > drop_ms AND ms <= damaged_ms GROUP BY o.stream
UNION ALL SELECT 'skipped_order', p.stream, '', count(*) FROM late p JOIN known k ON k.stream = p.stream
  WHERE p.turn = 1 AND p.ms <= k.order_floor_ms GROUP BY p.stream
