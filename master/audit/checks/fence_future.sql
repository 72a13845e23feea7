-- bad: A fencing token is not given before its time.
-- means: The record's fencing token lies in the future: sinks that have seen it refuse all that come after.
-- repair: Was Redis' clock set back, or the record written by hand? Restart the leader: it gives tokens from above it.
SELECT t.stream, t.id, t.ticket, t.owner, concat('fencing token ', t.fence) AS detail FROM tickets t JOIN facts f ON f.stream = t.stream
 WHERE (t.fence >> 10) > f.time_ms + 3600000 AND t.fence > (SELECT min(time_ms) * 1024 FROM facts)
UNION ALL
SELECT stream, id, ticket, consumer, concat(consumer, ' ran it under fencing token ', fence, ', of which the time came later')
  FROM timed WHERE (fence >> 10) > record_ms + 3600000
