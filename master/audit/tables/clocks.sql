-- How far each consumer's clock may be ahead of Redis', in microseconds: an execution starts after its fencing token was given and is recorded after its
-- end. As long as nobody sets a consumer's clock the offset is one constant, and two aggregates bound it; without bounds it is taken to be within the
-- tolerance. Where the two exclude one another, a clock was set, or drifted, if that is little: then less is known of it. What is taken for known is so
-- in whole milliseconds: each time it is better known, a proof judges its tickets again.
WITH bounds AS (SELECT stream, consumer, max(CASE WHEN end_us > 0 THEN end_us - (record_ms + 1) * 1000 END) AS above_us,
         min(CASE WHEN (fence >> 10) <= record_ms THEN start_us - (fence >> 10) * 1000 END) AS below_us
    FROM runs WHERE id IS NOT NULL GROUP BY stream, consumer
  UNION ALL SELECT stream, consumer, above_us, below_us FROM carried_clocks),
known AS (
  SELECT b.stream, b.consumer, max(l.clocks_ms) * 500 AS half_us, coalesce(max(b.above_us), -2305843009213693952) AS above_us,
         coalesce(min(b.below_us), 2305843009213693952) AS below_us
    FROM bounds b CROSS JOIN limits l GROUP BY b.stream, b.consumer)
SELECT stream, consumer, above_us, below_us, above_us > half_us OR below_us < -half_us AS is_wrong,
       CASE WHEN above_us > below_us THEN below_us - moved_us
            WHEN below_us < -half_us THEN greatest(above, below - 2 * half_us)
            ELSE greatest(above, -half_us) END AS least_us,
       CASE WHEN above_us > below_us THEN above_us + moved_us
            WHEN above_us > half_us THEN least(below, above + 2 * half_us)
            ELSE least(below, half_us) END AS most_us
  FROM (SELECT *, CASE WHEN above_us - below_us < half_us / 10 THEN above_us - below_us ELSE half_us END AS moved_us,
               above_us - (above_us % 1000 + 1000) % 1000 AS above, below_us + (1000 - below_us % 1000) % 1000 AS below
          FROM known) k
