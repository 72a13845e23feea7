-- look_again: read what suspects of the audit are about, entries of one ticket, at one moment.
-- KEYS: 1 stream, 2 tickets, 3 attempts
-- ARGV: 1 group, 2 the ticket's field in the index, 3... ids
-- Returns: {record of the ticket or nil, then for each id {owner or nil, idle in milliseconds, deliveries, attempts or
--          nil}}; an owner is nil where the entry is not pending, or it is no id
-- Why Lua: all of it is of one moment, also when memory is full, when Redis takes no MULTI.
-- Memory: works when full, as nothing is written
local told = {redis.call('HGET', KEYS[2], ARGV[2])}
for at = 3, #ARGV do
  local entry = redis.pcall('XPENDING', KEYS[1], ARGV[1], ARGV[at], ARGV[at], 1)[1] or {}
  told[at - 1] = {entry[2] or false, entry[3] or 0, entry[4] or 0, redis.call('HGET', KEYS[3], ARGV[at])}
end
return told
