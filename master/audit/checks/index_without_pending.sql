-- bad (again), No leader: An id in the record of a ticket that is given back, or halted, is pending.
-- means: The index holds a ticket for an entry that is over or was never delivered; its later entries may wait for it.
-- repair: The leader mends this by itself within seconds (`usher status`: is there one?); if it stays, restart it.
SELECT stream, id, ticket, owner, detail FROM indexed WHERE kind = 'index_without_pending'
