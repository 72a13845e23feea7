-- warn
-- rule: Starts of a message are counted one by one.
-- means: The run log has a start too many or too few: one was not noted, or ran under another one's number.
-- repair: Did another program change the attempts or the run log? Then this is its trace. If not, please report it.
-- A start that nobody could note is not counted, and one may be noted twice; what was started in one call with a message
-- that failed before it starts again under the number after.
SELECT r.stream, r.id, r.ticket, r.consumer AS owner,
       concat(r.consumer, ' started it as attempt ', r.attempt, ', after ', coalesce(r.last_attempt, 0)) AS detail
  FROM repeats r JOIN known k ON k.stream = r.stream
  LEFT JOIN (SELECT stream, ticket, consumer, fence, min(nth) AS nth FROM runs
              WHERE outcome IN ('failed', 'retry_later') GROUP BY stream, ticket, consumer, fence) b
    ON b.stream = r.stream AND b.ticket = r.ticket AND b.consumer = r.consumer AND b.fence = r.fence AND b.nth < r.nth
 WHERE r.is_over = 0 AND ((r.attempt <= r.noted AND (r.noted_fence = r.fence OR r.noted_ms < (r.fence >> 10)))
    OR (r.attempt > coalesce(r.noted, 0) + 1 AND r.ms > greatest(k.floor_ms, k.damaged_ms) AND b.nth IS NULL))
