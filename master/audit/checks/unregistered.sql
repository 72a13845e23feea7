-- warn (again): A living incarnation is registered.
-- means: It has a lease and never registered, so the leader gives it nothing and does not count it.
-- repair: Restart that consumer. Is another program reading this group?
SELECT stream, '' AS id, '' AS ticket, name AS owner, concat(pending, ' pending') AS detail FROM members WHERE is_ours AND lives AND NOT registered
