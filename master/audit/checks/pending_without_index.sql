-- bad, No leader: An entry that an incarnation has pending is in its ticket's record (tickets index).
-- means: It has an owner, but the master does not know that its ticket is in processing: a later one could overtake it.
-- repair: The leader mends this by itself within seconds (`usher status`: is there one?); if it stays, restart it.
SELECT stream, id, ticket, consumer AS owner, detail FROM indexed WHERE kind = 'pending_without_index'
