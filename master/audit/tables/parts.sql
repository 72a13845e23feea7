-- Milliseconds of which pending list and index of tickets may not say the same: each side is summed up as one number, which takes a fraction of a join
-- of ten million rows, and most milliseconds agree. What waits under `master` need not be in the index.
WITH named AS (
  SELECT nth, hash(stream, nth, CASE WHEN contains(ticket, '�') THEN NULL ELSE ticket END, owner) AS told, contains(owner, ':') AS is_owned
    FROM tickets WHERE id IS NOT NULL)
SELECT ms FROM (SELECT nth >> 21 AS ms, sum(hash(stream, nth, CASE WHEN contains(ticket, '�') THEN NULL ELSE ticket END, consumer)) AS pending,
         0 AS indexed, 0 AS is_held
    FROM entries WHERE contains(consumer, ':') GROUP BY nth >> 21
  UNION ALL SELECT nth >> 21, 0, sum(CASE WHEN is_owned THEN told ELSE 0 END), max(CASE WHEN is_owned THEN 0 ELSE 1 END)
    FROM named GROUP BY nth >> 21) s GROUP BY ms HAVING sum(pending) <> sum(indexed) OR max(is_held) = 1
