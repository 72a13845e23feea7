-- Starts of messages that did not simply run once, in the order in which they were counted; `life`: what ends a message
-- ends its count, and a new owner may begin anew at 1 behind a start that ended badly.
WITH starts AS (
  SELECT stream, ticket, id, ms, nth, fence, start_us, attempt, consumer, max(outcome) AS outcome, min(record_ms) AS record_ms
    FROM runs r SEMI JOIN (SELECT stream, id FROM ids WHERE starts > 1 OR most > 1) d
         ON d.stream = r.stream AND d.id = r.id
   GROUP BY stream, ticket, id, ms, nth, fence, start_us, attempt, consumer),
anew AS (
  SELECT *, CASE WHEN attempt = 1 AND lag(outcome) OVER turn IN ('failed', 'crashed') AND lag(fence) OVER turn < fence
                 THEN 1 ELSE 0 END AS is_anew
    FROM starts WINDOW turn AS (PARTITION BY stream, id ORDER BY fence, start_us, attempt)),
lives AS (SELECT *, sum(is_anew) OVER (PARTITION BY stream, id ORDER BY fence, start_us, attempt
                                       ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) AS life FROM anew),
told AS (
  SELECT *, lag(attempt) OVER turn AS last_attempt,
         coalesce(max(CASE WHEN outcome IN ('done', 'gave_up') THEN 1 ELSE 0 END) OVER before, 0) AS is_over,
         max(CASE WHEN outcome IN ('failed', 'crashed', 'retry_later') THEN attempt END) OVER before AS noted,
         max_by(fence, CASE WHEN outcome IN ('failed', 'crashed', 'retry_later') THEN attempt END) OVER before AS noted_fence,
         max_by(record_ms, CASE WHEN outcome IN ('failed', 'crashed', 'retry_later') THEN attempt END) OVER before AS noted_ms
    FROM lives
  WINDOW turn AS (PARTITION BY stream, id, life ORDER BY fence, start_us, attempt),
         before AS (PARTITION BY stream, id, life ORDER BY fence, start_us, attempt
                    ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING))
SELECT * FROM told
