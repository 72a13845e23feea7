-- bad (proof): No message of a ticket starts under a lower fencing token after one has started under a higher one.
-- means: A former owner started a message after its successor had: it was paused at the worst moment, or clocks differ.
-- repair: A fenced sink has refused its effect. Look for pauses of that process; set the clocks (NTP).
SELECT s.stream, s.id, s.ticket, s.consumer AS owner,
       concat(s.ran, '; ', max_by(t.consumer, t.start_least), ' started ', max_by(t.start_id, t.start_least), ' at ',
              at_utc(max_by(t.start_us, t.start_least)), ' under fencing token ', max_by(t.fence, t.start_least)) AS detail
  FROM suspects s JOIN turns t ON t.stream = s.stream AND t.ticket = s.ticket
 WHERE t.fence < s.fence AND t.consumer <> s.consumer AND t.start_least > s.start_most
 GROUP BY s.stream, s.id, s.ticket, s.consumer, s.ran, s.rec, s.n
