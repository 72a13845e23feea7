-- Odd messages that were sent again: a dead letter that is redriven goes, and its message is added again with its uid; a gathered one has its place in
-- its source.
WITH sent AS (SELECT stream, id, nth, coalesce(fields['usher_from'], nullif(fields['uid'], ''), id) AS known_by FROM messages)
SELECT o.stream, o.id FROM odd o JOIN sent s ON s.stream = o.stream AND s.id = o.id
  JOIN sent t ON t.stream = s.stream AND t.known_by = s.known_by AND t.nth > s.nth
 WHERE o.kind IN ('lost', 'passed', 'no_letter') GROUP BY o.stream, o.id
