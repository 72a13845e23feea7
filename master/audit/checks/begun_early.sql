-- bad
-- rule: A message runs after it was added.
-- means: It began long before its entry was there: the run log or the entry was written by another program.
-- look: usher audit --streams {stream} --group {group} runs --message {id}
-- look: redis-cli XRANGE {stream} {id} {id}
-- repair: Does a producer give ids of its own, from a clock that is ahead? If not, please report it.
SELECT stream, id, ticket, consumer AS owner,
       concat(consumer, ' began it at ', at_utc(start_most), ' (UTC), which is before it was added') AS detail
  FROM odd WHERE kind = 'early'
