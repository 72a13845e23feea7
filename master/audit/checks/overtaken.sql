-- bad (again, proof): While a message of a ticket is pending, no later one of the ticket is done.
-- means: A later message of the ticket was done before this one, which is still to come, and then out of order.
-- repair: The trace of XGROUP SETID by hand, over it and back? If not, please report it.
SELECT o.stream, o.id, o.own AS ticket, o.held_by AS owner, concat('pending for ', o.held_by, ', and ', o.passed, ' of its ticket is done') AS detail
  FROM odd o ANTI JOIN again a ON a.stream = o.stream AND a.id = o.id WHERE o.kind = 'passed' AND o.ms > o.drop_ms
