-- bad
-- rule: Of one consumer's incarnations only the last one acknowledges.
-- means: Two processes worked under one name, and both were believed.
-- look: redis-cli XINFO CONSUMERS {stream} {group}
-- repair: Stop one of them, and give each a name of its own.
-- The lease of an incarnation ends when the next one of its name registers: from then on nothing of it is acknowledged.
WITH done AS (SELECT stream, consumer, split_part(consumer, ':', 1) AS name, try_cast(split_part(consumer, ':', 2) AS BIGINT) AS number,
                     min(rec) AS first_rec, max(rec) AS last_rec
                FROM timed WHERE outcome = 'done' GROUP BY stream, consumer)
SELECT o.stream, '' AS id, '' AS ticket, o.consumer AS owner, concat('it acknowledged after ', min(n.consumer), ' had begun') AS detail
  FROM done o JOIN done n ON n.stream = o.stream AND n.name = o.name
 WHERE n.number > o.number AND n.first_rec < o.last_rec GROUP BY o.stream, o.consumer
