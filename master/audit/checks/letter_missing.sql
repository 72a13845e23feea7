-- bad (proof): A message that was given up has a dead letter, or was sent again, or its letter was dropped.
-- means: It was given up, was never done, and nothing is left of it to be redriven.
-- repair: Send it again if its effect is missing: usher send. Look for XDEL or DEL of dead letters by others.
SELECT o.stream, o.id, o.own AS ticket, '' AS owner, 'given up, and no letter' AS detail
  FROM odd o ANTI JOIN again a ON a.stream = o.stream AND a.id = o.id WHERE o.kind = 'no_letter' AND o.ms > o.known_ms AND o.ms > o.drop_ms
