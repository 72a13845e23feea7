-- note_checkpoint: tell the trimmers how far a log consumer is.
-- KEYS: 1 checkpoints
-- ARGV: 1 name, 2 version, 3 id, 4 "1" at the start of a consumer: what is noted is replaced, else ""
-- Returns: 1 noted, 0 a later version is noted
-- Why Lua: compare and write. A late note of a process that is slow, or was reset meanwhile, must not put the
--          checkpoint ahead of its SQL.
-- Memory: works when full (else nothing could be trimmed then)
--- @numbers large 2
local noted = redis.call('HGET', KEYS[1], ARGV[1])
if noted and ARGV[4] == '' and tonumber(string.match(noted, '^%d+')) >= tonumber(ARGV[2]) then return 0 end
at_full_memory(KEYS[1])
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2] .. ' ' .. ARGV[3] .. ' ' .. now_ms())
return 1
