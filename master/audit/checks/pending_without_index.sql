-- bad, No leader: pending record (indexed)
-- rule: An entry that an incarnation has pending is in its ticket's record (tickets index).
-- means: The entry has an owner, but the master does not know that its ticket is in processing: a later entry could
--   overtake it.
-- repair: The leader mends this by itself within seconds when one is alive (`usher status`); if it stays, restart the
--   leader: it takes over anew.
SELECT stream, id, ticket, consumer AS owner, detail FROM indexed WHERE kind = 'pending_without_index'
