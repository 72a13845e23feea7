-- bad (proof): Under one fencing token, and in one incarnation, executions of a ticket follow one another.
-- means: Two messages of a ticket ran at the same time in one incarnation.
-- repair: This is a fault of Usher, or the consumer's clock was set back: please report it with the two lines.
SELECT stream, id, ticket, consumer AS owner, concat(ran, '; ', other, ' ran until ', at_utc(ended_before)) AS detail
  FROM (SELECT *, max(ended_us) OVER before AS ended_before, max_by(id, ended_us) OVER before AS other,
               lag(start_us) OVER turn = start_us AND lag(ended_us) OVER turn = ended_us AS is_same_call
          FROM suspects
        WINDOW turn AS (PARTITION BY stream, ticket, consumer ORDER BY start_us, ended_us, nth, rec),
               before AS (PARTITION BY stream, ticket, consumer ORDER BY start_us, ended_us, nth, rec
                          ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)) s
 WHERE start_us < ended_before AND NOT is_same_call
