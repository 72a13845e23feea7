-- bad (proof): A message is done, or it is a dead letter; never both.
-- means: It has an effect and lies among the dead letters: a redrive would repeat it.
-- repair: Discard the letter instead of redriving it.
SELECT l.stream, l.id, l.ticket, r.consumer AS owner,
       concat('done by ', r.consumer, ' at ', at_utc(r.end_us), ' (UTC); dead letter ', l.letter, ', reason ', l.reason) AS detail
  FROM letters l JOIN runs r ON r.stream = l.stream AND r.id = l.id WHERE r.outcome = 'done'
