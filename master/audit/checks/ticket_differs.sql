-- bad (proof): A message runs under the ticket that is in its entry.
-- means: It ran under another ticket: beside messages that it should have come before or after.
-- repair: Do all masters and consumers have the same USHER_TICKET_FIELD? Did another program write to the run log?
SELECT stream, id, CASE WHEN ticket <> own THEN ticket ELSE other_ticket END AS ticket, consumer AS owner,
       CASE WHEN own IS NULL THEN concat('it ran for ', ticket, ' and for ', other_ticket)
            ELSE concat(consumer, ' ran it for this ticket; it is of ', own) END AS detail
  FROM odd WHERE kind = 'other_ticket'
UNION ALL
SELECT l.stream, l.id, l.ticket, '', concat('dead letter ', l.letter, ' is of this ticket; its message is of ', e.ticket)
  FROM letters l JOIN entries e ON e.stream = l.stream AND e.id = l.id
 WHERE e.in_stream AND l.ticket <> e.ticket AND NOT contains(concat(l.ticket, e.ticket), '�')
