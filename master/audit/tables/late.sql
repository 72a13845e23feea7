-- Executions behind a later message of their ticket; `turn`: of its message, the first one is the finding. Acknowledgements under one fencing token are
-- in the order of the run log, and Redis gives the tokens: no clock is asked. Of what did not succeed, which is recorded by itself, its owner's own
-- times tell. What comes behind the end of its message is a repeat, which is allowed.
WITH placed AS (SELECT *, max(CASE WHEN outcome IN ('done', 'gave_up') THEN 1 ELSE 0 END) OVER own AS had_ended,
         max(CASE WHEN outcome = 'done' THEN nth END) OVER before AS done_nth,
         max_by(id, CASE WHEN outcome = 'done' THEN nth END) OVER before AS done_id,
         max_by(consumer, CASE WHEN outcome = 'done' THEN nth END) OVER before AS done_by,
         max_by(fence, CASE WHEN outcome = 'done' THEN nth END) OVER before AS done_fence,
         max_by(start_us, CASE WHEN outcome = 'done' THEN nth END) OVER before AS done_start,
         max(CASE WHEN outcome <> 'done' THEN nth END) OVER turn AS begun_nth,
         max_by(id, CASE WHEN outcome <> 'done' THEN nth END) OVER turn AS begun_id
    FROM suspects
  WINDOW own AS (PARTITION BY stream, ticket, id ORDER BY fence, rec, n ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING),
         turn AS (PARTITION BY stream, ticket, consumer, fence ORDER BY start_us, ended_us, nth, rec
                  ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING),
         before AS (PARTITION BY stream, ticket ORDER BY fence, rec, n ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING))
SELECT p.*, row_number() OVER (PARTITION BY p.stream, p.ticket, p.id ORDER BY p.fence, p.rec, p.n) AS turn
  FROM placed p ANTI JOIN letters l ON l.stream = p.stream AND l.id = p.id AND (l.letter_ms + 1) * 1024 <= p.fence WHERE coalesce(p.had_ended, 0) = 0
   AND ((p.nth < p.done_nth AND (p.done_fence < p.fence OR (p.done_by = p.consumer AND (p.outcome = 'done' OR p.done_start < p.start_us))))
        OR p.nth < p.begun_nth)
