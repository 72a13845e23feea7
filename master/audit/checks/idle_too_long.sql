-- bad (again), Nothing moves: An entry of a living incarnation is never idle for longer than one lease: its renewal touches it.
-- means: The lease is extended, the entry not touched: the renewal cannot see it, or others extend the lease.
-- repair: Restart that consumer; its tickets go to others.
SELECT e.stream, e.id, e.ticket, e.consumer AS owner, e.detail
  FROM marked e CROSS JOIN limits l JOIN members m ON m.stream = e.stream AND m.name = e.consumer
 WHERE m.is_ours AND m.lives AND e.idle_ms > l.owner_idle_ms
