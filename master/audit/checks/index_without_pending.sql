-- bad, No leader: record pending (indexed)
-- rule: An id in a ticket's record is pending.
-- means: The index holds a ticket for an entry that is over or was never delivered; later entries of the ticket may
--   wait for it.
-- repair: The leader mends this by itself within seconds when one is alive (`usher status`); if it stays, restart the
--   leader: it takes over anew.
SELECT stream, id, ticket, owner, detail FROM indexed WHERE kind = 'index_without_pending'
