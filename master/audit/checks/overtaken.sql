-- bad: pending ticket (odd)
-- rule: While a message of a ticket is pending, no later one of the ticket is done.
-- means: A later message of the ticket was done before this one, which is still to come: when it runs, it is out of
--   order.
-- repair: Was the group set forward over it by hand, and back (XGROUP SETID)? Then this is its trace. If not, please
--   report it.
SELECT o.stream, o.id, o.own AS ticket, o.held_by AS owner, concat('pending for ', o.held_by, ', and ', o.passed, ' of its ticket is done') AS detail
  FROM odd o ANTI JOIN again a ON a.stream = o.stream AND a.id = o.id
 WHERE o.kind = 'passed' AND o.ms > o.drop_ms
