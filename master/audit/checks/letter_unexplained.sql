-- warn
-- rule: A message is given up after it ran.
-- means: Its letter says that it was given up, and no execution of it is recorded.
-- look: usher audit --streams {stream} --group {group} runs --message {id}
-- look: redis-cli XREVRANGE {dead} + - COUNT 10
-- repair: Look at the message, and redrive or discard its letter.
SELECT l.stream, l.id, l.ticket, '' AS owner, concat('dead letter ', l.letter, ', reason ', l.reason, '; no execution of it is recorded') AS detail
  FROM letters l JOIN known k ON k.stream = l.stream
  JOIN entries e ON e.stream = l.stream AND e.id = l.id
  ANTI JOIN ids i ON i.stream = l.stream AND i.id = l.id
 WHERE l.reason IN ('gave_up', 'attempts_exhausted') AND e.consumer IS NULL AND l.ms > greatest(k.floor_ms, k.damaged_ms)
