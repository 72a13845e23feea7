-- Pending entries that stand out by themselves: most checks look at no others.
SELECT e.*, concat('pending for ', e.consumer, ', idle ', e.idle_ms, ' ms, deliveries ', e.deliveries) AS detail FROM entries e CROSS JOIN limits l
 WHERE e.consumer IS NOT NULL AND (NOT e.in_stream OR e.deliveries > l.deliveries OR e.idle_ms > l.owner_idle_ms
        OR (e.consumer = 'master' AND e.idle_ms > l.parked_ms))
