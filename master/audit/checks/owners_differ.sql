-- bad (again), No leader: Pending list and index name the same owner.
-- means: The pending list says one incarnation has the entry, the index another one.
-- repair: The leader mends this by itself within seconds (`usher status`: is there one?); if it stays, restart it.
SELECT stream, id, ticket, consumer AS owner, detail FROM indexed WHERE kind = 'owners_differ'
