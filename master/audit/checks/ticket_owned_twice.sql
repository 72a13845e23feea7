-- bad: All entries of a ticket that incarnations have pending belong to one of them.
-- means: Two incarnations may run this ticket at once.
-- repair: Stop one of the two consumers; its entries are taken back and handed over in order.
SELECT e.stream, e.id, e.ticket, e.consumer AS owner,
       concat(o.id, ' of the same ticket is pending for ', o.consumer) AS detail
  FROM (SELECT stream, ticket, min(consumer) AS one, max(consumer) AS other FROM entries
         WHERE contains(consumer, ':') AND ticket IS NOT NULL GROUP BY stream, ticket HAVING min(consumer) <> max(consumer)) t
  JOIN (SELECT stream, ticket, consumer, min_by(id, nth) AS id FROM entries WHERE contains(consumer, ':')
         GROUP BY stream, ticket, consumer) e ON e.stream = t.stream AND e.ticket = t.ticket AND e.consumer = t.one
  JOIN (SELECT stream, ticket, consumer, min_by(id, nth) AS id FROM entries WHERE contains(consumer, ':')
         GROUP BY stream, ticket, consumer) o ON o.stream = t.stream AND o.ticket = t.ticket AND o.consumer = t.other
