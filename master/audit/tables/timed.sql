-- Executions that have a place in a ticket, with their times on Redis' clock as far as it is known.
SELECT r.*, greatest(r.end_us, r.start_us) AS ended_us, r.start_us - c.most_us AS start_least, r.start_us - c.least_us AS start_most,
       greatest(r.end_us, r.start_us) - c.most_us AS end_least
  FROM runs r JOIN clocks c ON c.stream = r.stream AND c.consumer = r.consumer WHERE r.id IS NOT NULL
