-- warn (again): Attempts are kept for pending entries only.
-- means: Attempts of an entry that is over: memory that is never freed.
-- repair: Delete the field: HDEL {prefix}attempts {id}.
SELECT a.stream, a.id, '' AS ticket, '' AS owner, concat(a.attempts, ' attempts, of which ', a.failures, ' count') AS detail
  FROM attempts a ANTI JOIN (SELECT e.stream, e.id FROM entries e SEMI JOIN attempts b ON b.stream = e.stream AND b.id = e.id
                            WHERE e.consumer IS NOT NULL) e ON e.stream = a.stream AND e.id = a.id
