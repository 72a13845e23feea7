-- bad (proof): A message runs after the group has read it.
-- means: The group has not read it, and it ran: it will be read, and run again; or it never was in the stream.
-- repair: Was the group set back (XGROUP SETID), or Redis restored from a copy? Then this is its trace.
SELECT stream, id, ticket, consumer AS owner, concat(consumer, ' ran it as ', outcome) AS detail FROM odd WHERE kind = 'unread'
