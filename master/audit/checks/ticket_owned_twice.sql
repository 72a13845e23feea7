-- bad (again): All entries of a ticket that incarnations have pending belong to one of them.
-- means: Two incarnations may run this ticket at once.
-- repair: Stop one of the two consumers; its entries are taken back and handed over in order.
WITH held AS (SELECT e.stream, e.ticket, e.consumer, min_by(e.id, e.nth) AS id
                FROM entries e SEMI JOIN apart a ON a.ticket = e.ticket AND a.stream = e.stream
               WHERE contains(e.consumer, ':') GROUP BY e.stream, e.ticket, e.consumer)
SELECT e.stream, e.id, e.ticket, e.consumer AS owner, concat(o.id, ' of the same ticket is pending for ', o.consumer) AS detail
  FROM (SELECT stream, ticket, min(consumer) AS one, max(consumer) AS other FROM held GROUP BY stream, ticket HAVING count(*) > 1) t
  JOIN held e ON e.stream = t.stream AND e.ticket = t.ticket AND e.consumer = t.one
  JOIN held o ON o.stream = t.stream AND o.ticket = t.ticket AND o.consumer = t.other
