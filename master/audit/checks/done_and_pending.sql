-- bad (again): A message that is done is not pending.
-- means: It is done, and it will run again: its effect will be there twice, unless its sink knows uids.
-- repair: The trace of XGROUP SETID by hand, or of a claim with FORCE? Then XACK what is done. If not, please report it.
SELECT o.stream, o.id, o.own AS ticket, o.held_by AS owner, concat('pending for ', o.held_by, ', and ', o.consumer, ' has done it') AS detail
  FROM odd o WHERE o.kind = 'held' AND NOT EXISTS (SELECT 1 FROM declared d WHERE d.stream = o.stream AND o.nth BETWEEN d.first_nth AND d.last_nth)
