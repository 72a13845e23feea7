-- warn (again, proof): A dead letter's message is over, or held under `halted` until the letter is dealt with.
-- means: The message is pending again beside its letter: it will run, and a redrive would run it once more.
-- repair: Was the group set back (XGROUP SETID)? Discard the letter when the message is done.
SELECT l.stream, l.id, l.ticket, e.consumer AS owner, concat('pending for ', e.consumer) AS detail
  FROM letters l JOIN entries e ON e.stream = l.stream AND e.id = l.id WHERE e.consumer <> 'halted'
