-- bad (proof): What is recorded as done is not done again, but for a former owner's success, recorded behind its successor's.
-- means: It succeeded, Redis knew, and it succeeded again: its effect is there twice, unless its sink knows uids.
-- repair: No master declared it (`usher doctor`). The trace of XGROUP SETID, or of data copied back? If not, please report it.
SELECT stream, id, ticket, consumer AS owner, detail FROM twice WHERE NOT is_declared
