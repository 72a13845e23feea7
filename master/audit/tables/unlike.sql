-- Places at which they do not. An owner's record may name what is over.
SELECT nth, stream FROM (SELECT nth, stream, hash(id, coalesce(ticket, concat('�', id)), consumer) AS told, 1 AS is_entry,
         CASE WHEN contains(consumer, ':') THEN 1 ELSE 0 END AS matters
    FROM entries e SEMI JOIN parts p ON p.ms = e.nth >> 21 WHERE consumer IS NOT NULL
  UNION ALL SELECT nth, stream, hash(id, ticket, owner), 0, CASE WHEN contains(owner, ':') THEN 0 ELSE 1 END
    FROM tickets t SEMI JOIN parts p ON p.ms = t.nth >> 21 WHERE id IS NOT NULL) b GROUP BY nth, stream
HAVING NOT (count(*) = 2 AND sum(is_entry) = 1 AND min(told) = max(told)) AND NOT (count(*) = 1 AND max(matters) = 0)
