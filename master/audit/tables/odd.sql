-- Messages of which stream, pending list, run log and dead letters do not say the same. A ticket that is no UTF-8 may read like another one, so nothing
-- is said of it.
WITH ahead AS (SELECT stream, ticket, max(nth) AS nth, max_by(id, nth) AS id FROM (SELECT stream, ticket, nth, id FROM runs WHERE outcome = 'done'
  UNION ALL SELECT stream, ticket, nth, id FROM carried WHERE nth IS NOT NULL) d GROUP BY stream, ticket),
joined AS (
  SELECT coalesce(e.stream, i.stream) AS stream, coalesce(e.id, i.id) AS id, coalesce(e.ms, i.ms) AS ms,
         coalesce(e.nth, i.nth) AS nth, e.ticket AS own, e.consumer AS held_by, coalesce(e.in_stream, false) AS in_stream,
         e.id IS NOT NULL AS was_read, i.id IS NOT NULL AS ran, coalesce(i.done, false) AS done,
         coalesce(i.gave_up, false) AS gave_up, i.ticket, i.other_ticket, i.consumer, i.outcome
    FROM (SELECT e.* FROM entries e SEMI JOIN stretches s ON s.part = e.nth >> 26 AND s.stream = e.stream WHERE e.consumer IS NULL
          UNION ALL SELECT e.* FROM entries e SEMI JOIN (SELECT stream FROM ids UNION SELECT stream FROM ahead) h ON h.stream = e.stream
                     WHERE e.consumer IS NOT NULL) e
    FULL OUTER JOIN ids i ON i.nth = e.nth AND i.stream = e.stream AND i.id = e.id)
SELECT * FROM (
SELECT b.*, a.id AS passed, k.floor_ms, k.known_ms, k.damaged_ms, k.drop_ms,
       CASE WHEN ran AND b.nth > k.delivered_nth THEN 'unread'
            WHEN NOT was_read AND ran AND b.nth > k.first_nth AND b.nth > k.deleted_nth AND b.nth < k.last_nth THEN 'unread'
            WHEN ran AND in_stream AND (b.ticket <> own OR other_ticket <> own) AND NOT contains(concat(own, b.ticket, other_ticket), '�')
            THEN 'other_ticket'
            WHEN NOT in_stream AND b.ticket <> other_ticket AND NOT contains(concat(b.ticket, other_ticket), '�') THEN 'other_ticket'
            WHEN in_stream AND held_by IS NOT NULL AND done THEN 'held'
            WHEN b.nth > k.delivered_nth THEN NULL
            WHEN in_stream AND b.ms > k.floor_ms AND l.letter IS NULL AND held_by IS NULL AND gave_up AND NOT done THEN 'no_letter'
            WHEN in_stream AND b.ms > k.floor_ms AND l.letter IS NULL AND held_by IS NULL AND NOT done THEN 'lost'
            WHEN in_stream AND b.ms > k.floor_ms AND l.letter IS NULL AND NOT done AND NOT gave_up AND b.nth < a.nth
                 AND NOT contains(own, '�') THEN 'passed' END AS kind FROM joined b JOIN known k ON k.stream = b.stream
  LEFT JOIN (SELECT stream, id, min(letter) AS letter FROM letters GROUP BY stream, id) l ON l.stream = b.stream AND l.id = b.id
  LEFT JOIN ahead a ON a.stream = b.stream AND a.ticket = b.own AND b.held_by IS NOT NULL) o WHERE kind IS NOT NULL
