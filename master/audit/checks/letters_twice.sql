-- warn (proof): A message has one dead letter at most.
-- means: It lies among the dead letters more than once: redriving them all would run it as often.
-- repair: Was the group set back (XGROUP SETID)? Discard all of its letters but one.
SELECT stream, id, min(ticket) AS ticket, '' AS owner, concat(count(*), ' dead letters') AS detail
  FROM letters GROUP BY stream, id HAVING count(*) > 1
