-- bad (again): Names in the group are incarnations (`name:generation`), `master` or `halted`.
-- means: Another program reads this group, or entries were claimed by hand: these entries are not handed over in order.
-- repair: Stop that program, or give it a group of its own; the leader's sweep brings idle entries back.
SELECT stream, '' AS id, '' AS ticket, name AS owner, concat(pending, ' pending') AS detail FROM members WHERE NOT is_ours AND pending > 0
