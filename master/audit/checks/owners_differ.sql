-- bad, No leader: pending record (indexed)
-- rule: Pending list and index name the same owner.
-- means: The pending list says one incarnation has the entry, the index another one.
-- repair: The leader mends this by itself within seconds when one is alive (`usher status`); if it stays, restart the
--   leader: it takes over anew.
SELECT stream, id, ticket, consumer AS owner, detail FROM indexed WHERE kind = 'owners_differ'
