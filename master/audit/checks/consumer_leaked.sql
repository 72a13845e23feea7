-- warn (again), No leader: The leader reaps incarnations whose lease ended and that have nothing pending.
-- means: A name of the group is left over: harmless, but each start of a consumer adds one.
-- repair: Does a master lead (`usher status`)? Its janitor reaps. XGROUP DELCONSUMER would delete what is pending.
SELECT m.stream, '' AS id, '' AS ticket, m.name AS owner, concat('no lease, idle for ', CAST(m.idle_ms / 1000 AS BIGINT), ' s') AS detail
  FROM members m CROSS JOIN limits l WHERE m.is_ours AND NOT m.lives AND m.pending = 0 AND m.idle_ms > l.reaped_ms
