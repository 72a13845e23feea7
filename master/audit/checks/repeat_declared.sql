-- warn (proof): A message that is recorded as done comes again only after a master has declared that it may.
-- means: It succeeded again after a loss that a master declared: its effect is there twice, unless its sink knows uids.
-- repair: Look whether its effects must be undone; a sink that knows uids has refused them.
SELECT stream, id, ticket, consumer AS owner, detail FROM twice WHERE is_declared
