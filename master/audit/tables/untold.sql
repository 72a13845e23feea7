-- What owners may not have been told of: it is above what their inbox begins with, or they have run what they were given later, and this for longer than
-- anything runs not at all (an inbox is trimmed when it is read).
SELECT t.*, t.fence > i.since AS is_new FROM tickets t JOIN facts f ON f.stream = t.stream CROSS JOIN limits m
  JOIN members o ON o.stream = t.stream AND o.name = t.owner AND o.lives
  JOIN (SELECT stream, owner, max(since) AS since FROM inboxes GROUP BY stream, owner) i ON i.stream = t.stream AND i.owner = t.owner
  LEFT JOIN (SELECT stream, consumer, max(fence) AS fence, max(start_most) AS start_us,
                    max(max(ended_us - start_us)) OVER (PARTITION BY stream) AS longest_us
               FROM timed GROUP BY stream, consumer) w ON w.stream = t.stream AND w.consumer = t.owner
 WHERE t.fence > i.since OR (t.fence < w.fence AND w.start_us > (t.fence >> 10) * 1000
                             AND f.time_ms - (t.fence >> 10) > greatest(m.parked_ms, 3 * w.longest_us / 1000))
