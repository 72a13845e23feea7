-- Stretches of ids (32 ms) in which not just each entry that is over was done once, under its ticket: all others are in order, so messages of these are
-- looked at one by one.
SELECT stream, part FROM (
  SELECT e.stream, e.nth >> 26 AS part, hash(e.id, CASE WHEN contains(e.ticket, '�') THEN NULL ELSE e.ticket END) AS entry, 0 AS run, 0 AS is_odd
    FROM entries e JOIN facts f ON f.stream = e.stream WHERE e.consumer IS NULL AND e.nth <= f.delivered_nth
  UNION ALL
  SELECT stream, nth >> 26, 0, hash(id, CASE WHEN contains(ticket, '�') THEN NULL ELSE ticket END), CASE WHEN outcome = 'done' THEN 0 ELSE 1 END
    FROM timed) t GROUP BY stream, part HAVING sum(entry) <> sum(run) OR max(is_odd) = 1
