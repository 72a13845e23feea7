-- All executions of the tickets in doubt; `ran`: an execution in words.
SELECT t.*, concat(t.consumer, ' ran it from ', at_utc(t.start_us), ' to ',
                   CASE WHEN t.end_us = 0 THEN 'the end of its process' ELSE at_utc(t.end_us) END,
                   ' (UTC) under fencing token ', t.fence) AS ran
  FROM timed t SEMI JOIN doubtful d ON d.stream = t.stream AND d.ticket = t.ticket
