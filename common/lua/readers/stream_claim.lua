-- stream_claim: a plain reader takes entries that have been idle, because their reader died or gave them back.
-- KEYS: 1 stream, 2 dead, 3 attempts, 4 letters
-- ARGV: 1 group, 2 reader, 3 least idle time in ms, 4 cursor ("0-0" at first), 5 count
-- Returns: {next cursor, {id, fields, former reader, failed attempts so far, ...}, {ids whose body was gone: they are
--          dead letters now}}; fewer than asked for where bodies are large
-- Why Lua: see claim_idle. JUSTID: taking over is no delivery.
-- Memory: works when full
--- @numbers large 3, count 5
redis.call('XLEN', KEYS[2]) -- what is no stream fails here, before anything has changed
at_full_memory(KEYS[3])
local taken, gone = {}, {}
local function never() return false end
local function take(id, fields, owner)
  local n = #taken
  taken[n + 1], taken[n + 2], taken[n + 3] = id, fields, owner
  taken[n + 4] = redis.call('HGET', KEYS[3], id) or '0'
end
local function lose(id, owner)
  local starts = string.match(redis.call('HGET', KEYS[3], id) or '', '^%d+') or '0'
  bury(KEYS[2], id, '', 'body_gone', '', starts, owner, now_ms(), now_ms(), nil)
  redis.call('XACK', KEYS[1], ARGV[1], id)
  redis.call('HDEL', KEYS[3], id)
  gone[#gone + 1] = id
end
local count = tonumber(ARGV[5])
local following = claim_idle(KEYS[1], ARGV[1], ARGV[2], ARGV[3], ARGV[4], count, never, never, take, lose)
return {following, taken, gone}
