-- progress: parts of results go to their callers while handlers run.
-- KEYS: 1 lease of the incarnation whose handlers sent them, 2 and further ones: a reply stream for each part
-- ARGV: for each part: call, fence, attempt, its number, kind, the part
-- Returns: "LOST" (no lease; nothing happened), "OK", or why a part was not written: else it is as OK
-- Why Lua: while the lease lives nobody else runs these messages; one that is over by then sends nothing.
-- Memory: works when full
--- @include answer
if redis.call('EXISTS', KEYS[1]) == 0 then return 'LOST' end
redis.pcall('XDEL', KEYS[2], '0-0') -- a write that needs no memory goes first (at_full_memory)
local untold
for at = 2, #KEYS do
  local call, fence, attempt, number, kind, part = unpack(ARGV, 6 * at - 11, 6 * at - 6)
  untold = answer(KEYS[at], call, 'fence', fence, 'attempt', attempt, 'part', number, kind, part) or untold
end
return untold or 'OK'
