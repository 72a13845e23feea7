-- bad
-- rule: A dead letter is of a message that was in the stream.
-- means: No such message ever was: the letter was written by another program.
-- look: redis-cli XREVRANGE {dead} + - COUNT 10
-- look: redis-cli XRANGE {stream} {id} {id}
-- repair: Discard the letter; find the program that writes to {dead}.
SELECT l.stream, l.id, l.ticket, '' AS owner, concat('dead letter ', l.letter, '; there is no such message') AS detail
  FROM letters l JOIN known k ON k.stream = l.stream ANTI JOIN entries e ON e.stream = l.stream AND e.id = l.id
 WHERE (l.nth > k.delivered_nth AND l.ms < 4398046511103) OR (l.nth > k.first_nth AND l.nth > k.deleted_nth AND l.nth < k.last_nth)
