-- warn
-- rule: A message that has failed USHER_MAX_ATTEMPTS times becomes a dead letter.
-- means: It failed more often, and started again.
-- repair: Has its handler max_attempts of its own? Then this is well; else: have all consumers one USHER_MAX_ATTEMPTS?
SELECT r.stream, r.id, r.ticket, '' AS owner, concat('failed ', max(r.failed), ' times') AS detail
  FROM (SELECT stream, ticket, id, life, count(*) AS failed FROM repeats WHERE outcome = 'failed' AND is_over = 0
         GROUP BY stream, ticket, id, life) r CROSS JOIN limits l
 WHERE r.failed > l.attempts GROUP BY r.stream, r.ticket, r.id
