-- warn (again), Stuck ticket: A message becomes a dead letter after USHER_MAX_ATTEMPTS starts that ended badly.
-- means: More of them were counted than the limit allows, or it is about to be given up.
-- repair: Look at the message and its handler's log.
SELECT a.stream, a.id, e.ticket, e.consumer AS owner, concat(a.attempts, ' attempts, of which ', a.failures, ' count') AS detail
  FROM attempts a JOIN entries e ON e.stream = a.stream AND e.id = a.id CROSS JOIN limits l WHERE e.consumer IS NOT NULL AND a.failures > l.attempts
