-- warn (proof): Recorded executions under different fencing tokens follow one another, unless a process was paused.
-- means: A former owner still ran while its successor did: a sink that checks fencing tokens took the effect of one.
-- repair: Look for pauses (suspend, swap, long collections) of the earlier owner, and at clocks. Use a fenced sink.
SELECT s.stream, s.id, s.ticket, s.consumer AS owner,
       concat(s.ran, '; ', max_by(t.consumer, t.end_least), ' ran ', max_by(t.end_id, t.end_least), ' until ',
              at_utc(max_by(t.end_us, t.end_least)), ' under fencing token ', max_by(t.fence, t.end_least)) AS detail
  FROM suspects s JOIN turns t ON t.stream = s.stream AND t.ticket = s.ticket
 WHERE t.fence < s.fence AND t.consumer <> s.consumer AND t.end_least > s.start_most
 GROUP BY s.stream, s.id, s.ticket, s.consumer, s.ran, s.rec, s.n, s.start_most
HAVING max(t.start_least) <= s.start_most
