-- What the run log says of each message in these stretches.
SELECT stream, id, min(ms) AS ms, min(nth) AS nth,
       min(replace(ticket, concat('�', id), '')) AS ticket, max(replace(ticket, concat('�', id), '')) AS other_ticket,
       max(CASE WHEN outcome = 'done' THEN 1 ELSE 0 END) = 1 AS done, max(CASE WHEN outcome = 'gave_up' THEN 1 ELSE 0 END) = 1 AS gave_up,
       min(consumer) AS consumer, min(outcome) AS outcome
  FROM timed t SEMI JOIN stretches s ON s.part = t.nth >> 26 AND s.stream = t.stream GROUP BY stream, id
