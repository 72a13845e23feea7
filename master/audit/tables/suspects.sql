-- All executions of the tickets in doubt, and those of messages without a ticket id that ran more than once; `ran`: an
-- execution in words.
SELECT t.*, concat(t.consumer, ' ran it from ', at_utc(t.start_us), ' to ',
                   CASE WHEN t.end_us = 0 THEN 'the end of its process' ELSE at_utc(t.end_us) END,
                   ' (UTC) under fencing token ', t.fence) AS ran
  FROM (SELECT o.* FROM timed o SEMI JOIN doubtful d ON d.stream = o.stream AND d.ticket = o.ticket
        UNION ALL
        SELECT o.* FROM timed o SEMI JOIN (SELECT stream, id FROM timed WHERE ticket = '' GROUP BY stream, id HAVING count(*) > 1) d
            ON d.stream = o.stream AND d.id = o.id WHERE o.ticket = '') t
