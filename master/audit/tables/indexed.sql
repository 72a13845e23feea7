-- Entries of which pending list and index of tickets do not say the same, one by one. A message without a ticket id is a ticket of its own, under a name
-- that is no text. An owner's record names what it was given: some of it may be over.
SELECT coalesce(e.stream, t.stream) AS stream, coalesce(e.id, t.id) AS id, coalesce(e.ticket, t.ticket) AS ticket, e.consumer, t.owner,
       concat(CASE WHEN e.id IS NULL THEN '' ELSE concat('pending for ', e.consumer, ', idle ', e.idle_ms, ' ms, deliveries ',
                                                         e.deliveries) END,
              CASE WHEN t.id IS NULL THEN '' ELSE concat(CASE WHEN e.id IS NULL THEN '' ELSE ', ' END, 'index says ', t.owner) END
             ) AS detail,
       CASE WHEN e.id IS NULL THEN 'index_without_pending'
            WHEN t.id IS NULL OR t.ticket <> coalesce(e.ticket, concat('�', e.id)) THEN 'pending_without_index'
            ELSE 'owners_differ' END AS kind
  FROM (SELECT p.*, m.name IS NOT NULL AS is_strange FROM apart p
          LEFT JOIN members m ON m.stream = p.stream AND m.name = p.consumer AND NOT m.is_ours) e
  FULL OUTER JOIN (SELECT * FROM tickets t SEMI JOIN unlike u ON u.nth = t.nth AND u.stream = t.stream) t ON t.nth = e.nth AND t.stream = e.stream AND t.id = e.id
 WHERE (e.id IS NULL AND NOT contains(t.owner, ':')) OR (NOT e.is_strange AND t.id IS NULL AND contains(e.consumer, ':') AND e.in_stream)
    OR (NOT e.is_strange AND t.id IS NOT NULL AND ((t.ticket <> coalesce(e.ticket, concat('�', e.id)) AND contains(e.consumer, ':') AND e.in_stream)
             OR NOT CASE WHEN t.owner = 'returned' OR t.owner LIKE 'waits@%' THEN e.consumer = 'master'
                         WHEN t.owner = 'halted' THEN e.consumer IN ('master', 'halted')
                         ELSE e.consumer = t.owner END))
