-- What a look knows of each stream as a whole: from which ms on every execution is in the run log (floor_ms), the first message that was handled, and
-- how far ids are ahead of Redis' clock (producers that give ids, a clock set back).
SELECT s.*, CASE WHEN base_ms < 0 THEN -1 ELSE base_ms + ahead_ms END AS floor_ms,
       CASE WHEN order_ms < 0 THEN -1 ELSE order_ms + ahead_ms END AS order_floor_ms FROM (
SELECT f.*, coalesce(r.damaged_ms, -1) AS damaged_ms, least(r.first_ms, p.ms) AS handled_ms,
       coalesce(least(r.first_ms, p.ms, f.handled_before_ms), 4611686018427387904) AS known_ms,
       least(greatest(0, r.ahead_ms, f.delivered_ms - f.time_ms, f.ahead_before_ms), 1152921504606846976) AS ahead_ms
  FROM facts f LEFT JOIN (SELECT stream, min(ms) AS first_ms, max(ms - record_ms) AS ahead_ms,
                    max(CASE WHEN id IS NULL THEN record_ms END) AS damaged_ms FROM runs GROUP BY stream) r
    ON r.stream = f.stream
  LEFT JOIN held p ON p.stream = f.stream) s
