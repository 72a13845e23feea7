-- warn
-- rule: An execution ends after it starts, and of one owner's executions the first recorded has not begun last.
-- means: The consumer's clock was set back meanwhile: proofs by time are weaker around that moment.
-- repair: Let NTP slew the clock, not step it.
SELECT stream, id, ticket, consumer AS owner, ran AS detail FROM suspects WHERE end_us <> 0 AND end_us < start_us
UNION ALL
SELECT stream, id, ticket, consumer,
       concat(consumer, ': it began behind ', next_id, ' by its consumer''s clock, and was noted before that one')
  FROM (SELECT *, lead(start_us) OVER turn AS next_us, lead(id) OVER turn AS next_id FROM suspects
         WHERE outcome = 'done'
        WINDOW turn AS (PARTITION BY stream, ticket, consumer, fence ORDER BY rec, n)) s
 WHERE next_us < start_us AND next_id <> id
