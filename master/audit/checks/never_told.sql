-- bad: What an incarnation owns was handed over in its inbox, as far back as that goes.
-- means: It owns the entry and was never told: it does not run it, and later entries of the ticket wait.
-- repair: Restart that consumer: its tickets are handed over anew. Did another program write to index or inbox?
-- An inbox is trimmed when it is read. Of what it held before, this is known: its owner has run what it was given later,
-- and this for longer than anything runs not at all.
WITH held AS (SELECT t.* FROM tickets t SEMI JOIN entries e ON e.stream = t.stream AND e.id = t.id AND e.consumer = t.owner),
inbox AS (SELECT stream, owner, max(since) AS since FROM inboxes GROUP BY stream, owner),
worked AS (SELECT stream, consumer, max(fence) AS fence, max(start_most) AS start_us,
                  max(max(ended_us - start_us)) OVER (PARTITION BY stream) AS longest_us
             FROM timed GROUP BY stream, consumer)
SELECT t.stream, t.id, t.ticket, t.owner, concat('handed over under fencing token ', t.fence) AS detail
  FROM held t JOIN inbox i ON i.stream = t.stream AND i.owner = t.owner
  ANTI JOIN inboxes b ON b.stream = t.stream AND b.owner = t.owner AND b.id = t.id
 WHERE t.fence > i.since
UNION ALL
SELECT t.stream, t.id, t.ticket, t.owner,
       concat('handed over under fencing token ', t.fence, ' and never begun; its owner has run what it was given later')
  FROM (SELECT stream, ticket, owner, fence, min_by(id, nth) AS id FROM held
         GROUP BY stream, ticket, owner, fence) t
  JOIN inbox i ON i.stream = t.stream AND i.owner = t.owner AND t.fence <= i.since
  JOIN facts f ON f.stream = t.stream CROSS JOIN limits m
  JOIN worked w ON w.stream = t.stream AND w.consumer = t.owner AND w.fence > t.fence
  ANTI JOIN ids r ON r.stream = t.stream AND r.id = t.id
  ANTI JOIN inboxes b ON b.stream = t.stream AND b.owner = t.owner AND b.id = t.id
 WHERE f.time_ms - (t.fence >> 10) > greatest(m.parked_ms, 3 * w.longest_us / 1000) AND w.start_us > (t.fence >> 10) * 1000
