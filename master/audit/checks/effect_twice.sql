-- bad: runs entry (twice)
-- rule: A message that is recorded as done is not done again; only a former owner may record another success, behind
--   its successor's.
-- means: It succeeded, Redis knew, and it succeeded again: its effect is there twice, unless its sink knows uids.
-- repair: No master declared it (`usher doctor` tells declared losses). Was the group set back by hand, or Redis' data
--   copied back? Then this is its trace. If not, please report it.
SELECT stream, id, ticket, consumer AS owner, detail FROM twice WHERE NOT is_declared
