-- Tickets in which anything may be wrong: one sort, and no execution of any other ticket breaks a rule, for where none is before its predecessor, none
-- is before an earlier one. `carried`: what former proofs know of each ticket.
WITH placed AS (SELECT stream, ticket, consumer, fence, nth, rec, start_us, ended_us, outcome, start_most,
         lag(fence) OVER turn AS fence_before, lag(consumer) OVER turn AS consumer_before,
         lag(start_us) OVER turn AS start_before, lag(ended_us) OVER turn AS ended_before, lag(nth) OVER turn AS nth_begun,
         max(end_least) OVER before AS end_least_before,
         max(CASE WHEN outcome = 'done' THEN nth END) OVER before AS nth_before,
         max(CASE WHEN outcome = 'done' THEN rec END) OVER before AS rec_before,
         max(CASE WHEN outcome = 'done' THEN rec END) OVER lower AS rec_lower
    FROM timed
  WINDOW lower AS (PARTITION BY stream, ticket ORDER BY fence RANGE BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING),
         turn AS (PARTITION BY stream, ticket ORDER BY fence, start_us, ended_us, nth, rec),
         before AS (PARTITION BY stream, ticket ORDER BY fence, start_us, ended_us, nth, rec
                    ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING))
SELECT stream, ticket FROM placed
 WHERE nth <= nth_before OR (fence = fence_before AND nth < nth_begun) OR (outcome = 'done' AND rec < rec_before) OR rec < rec_lower
    OR (fence = fence_before AND consumer <> consumer_before) OR ((start_us < ended_before OR start_most < end_least_before)
        AND NOT (fence = fence_before AND start_us = start_before AND ended_us = ended_before)) GROUP BY stream, ticket
UNION
SELECT t.stream, t.ticket FROM (SELECT stream, ticket, min(fence) AS fence, min(start_us) AS start_us, min(start_most) AS start_most,
         min(nth) AS nth, min_by(consumer, fence) AS consumer
    FROM timed GROUP BY stream, ticket) t JOIN carried c ON c.stream = t.stream AND c.ticket = t.ticket
 WHERE t.fence < c.fence OR (t.fence = c.fence AND t.consumer <> c.consumer) OR t.nth <= c.nth OR t.nth < c.begun_nth OR t.start_us < c.ended_us
    OR t.start_most < c.end_least
