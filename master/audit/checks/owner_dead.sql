-- bad (again), No leader: Every pending entry has a living owner, or is taken back from a dead one within the recovery bound.
-- means: These entries are pending for an incarnation whose lease ended long ago; no consumer works on them.
-- repair: See that a master leads (`usher status`); it takes them back. No master: start one.
SELECT m.stream, '' AS id, '' AS ticket, m.name AS owner,
       concat(m.pending, ' pending, the oldest idle for ', CAST(m.oldest_idle_ms / 1000 AS BIGINT), ' s') AS detail
  FROM members m CROSS JOIN limits l WHERE m.is_ours AND NOT m.lives AND m.pending > 0 AND m.oldest_idle_ms > l.owner_idle_ms
