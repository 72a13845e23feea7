-- What later executions of each ticket are compared with: a row for each, of which all columns are maxima.
SELECT stream, ticket, max(fence) AS fence, max_by(consumer, fence) AS consumer, max(nth) AS nth, max_by(id, nth) AS id,
       max(begun_nth) AS begun_nth, max(ended_us) AS ended_us, max(end_least) AS end_least
  FROM (SELECT stream, ticket, fence, consumer, CASE WHEN outcome = 'done' THEN nth END AS nth,
               CASE WHEN outcome = 'done' THEN id END AS id,
               nth AS begun_nth, ended_us, end_least FROM timed
        UNION ALL SELECT stream, ticket, fence, consumer, nth, id, begun_nth, ended_us, end_least FROM carried) c GROUP BY stream, ticket
