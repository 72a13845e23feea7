-- bad (proof): A success counts under the fencing token of the last hand-over; a former owner's is refused.
-- means: A former owner's success counted while another one had its ticket: it is over, its effect maybe there twice.
-- repair: Did Redis fail over, or was it restored from a copy? Then this may be its trace. If not, please report it.
-- Before such a success was recorded its ticket was handed over under a higher fencing token: an execution under that was recorded before, or is of this
-- very message, for a message that is done is not handed over. Of successes of one message only one that was recorded earlier under a higher token makes
-- it known to be over.
WITH done AS (SELECT s.*, max(fence) OVER (PARTITION BY stream, ticket, id ORDER BY rec, n) AS highest FROM suspects s WHERE outcome = 'done'),
others AS (
  SELECT d.*, o.fence AS by_fence, o.consumer AS by_consumer, o.id AS by_id, o.start_us AS by_us
    FROM done d JOIN suspects o ON o.stream = d.stream AND o.ticket = d.ticket AND o.id = d.id
   WHERE o.outcome <> 'done' AND o.fence > d.fence AND (o.fence >> 10) < d.record_ms AND d.fence = d.highest
  UNION ALL SELECT d.*, o.fence, o.consumer, o.rec_id, o.rec_us FROM done d JOIN turns o ON o.stream = d.stream AND o.ticket = d.ticket
   WHERE o.fence > d.fence AND o.rec < d.rec AND d.fence = d.highest)
SELECT stream, id, ticket, consumer AS owner,
       concat(ran, '; it was noted as done at ', at_utc(record_ms * 1000), ', when ', min_by(by_consumer, by_fence),
              ' had the ticket: under fencing token ', min(by_fence), ' it ran ', min_by(by_id, by_fence), ' from ',
              at_utc(min_by(by_us, by_fence)), ' on') AS detail
  FROM others GROUP BY stream, id, ticket, consumer, ran, record_ms
