-- Each owner's time of each ticket in doubt, as far as executions of it are recorded.
SELECT stream, ticket, fence, consumer, max(start_least) AS start_least, max_by(id, start_least) AS start_id,
       max_by(start_us, start_least) AS start_us, max(end_least) AS end_least, max_by(id, end_least) AS end_id,
       max_by(ended_us, end_least) AS end_us, min(rec) AS rec, min_by(id, rec) AS rec_id, min_by(start_us, rec) AS rec_us
  FROM suspects GROUP BY stream, ticket, fence, consumer
