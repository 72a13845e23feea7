-- bad (proof): A message of a ticket starts only when every earlier one is done or given up.
-- means: A later message of the ticket had started before this one was ever done.
-- repair: Effects of this ticket may be wrong: compare them, then please report it.
SELECT p.stream, p.id, p.ticket, p.consumer AS owner,
       CASE WHEN p.nth < p.done_nth THEN concat(p.ran, '; ', p.done_by, ' had done ', p.done_id, ' before it')
            ELSE concat(p.ran, '; it had started ', p.begun_id, ' before it') END AS detail
  FROM late p JOIN known k ON k.stream = p.stream WHERE p.turn = 1 AND p.ms > k.order_floor_ms
