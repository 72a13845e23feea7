-- stream_claim: a plain reader takes entries that have been idle, because their reader died or gave them back.
-- KEYS: 1 stream, 2 dead, 3 attempts, 4 letters
-- ARGV: 1 group, 2 reader, 3 least idle time in ms, 4 cursor ("0-0" at first), 5 count
-- Returns: {next cursor, {id, fields, former reader, failed attempts so far, ...}, {ids whose body was gone: they are
--          dead letters now}}; fewer than asked for where bodies are large
-- Why Lua: XAUTOCLAIM does not say whose the entries were. JUSTID: taking over is no delivery. Without the cursor,
--          what lies behind 10 x COUNT young entries is never found.
-- Memory: works when full
--- @include bodies index answer letter at_full_memory
--- @numbers large 3, count 5
local stream, group = KEYS[1], ARGV[1]
local count = tonumber(ARGV[5])
redis.call('XLEN', KEYS[2]) -- what is no stream fails here, before anything has changed
local rows, owners = redis.call('XPENDING', stream, group, ARGV[4], '+', 10 * count), {}
local idle_ms, following = {}, nil
for _, row in ipairs(rows) do owners[row[1]], idle_ms[row[1]] = row[2], row[3] end
at_full_memory(KEYS[3])
local taken, gone = {}, {}
local function body_is_gone(id)
  local starts = string.match(redis.call('HGET', KEYS[3], id) or '', '^%d+') or '0'
  bury(KEYS[2], id, '', 'body_gone', '', starts, owners[id] or '', now_ms(), now_ms(), nil)
  redis.call('XACK', stream, group, id)
  redis.call('HDEL', KEYS[3], id)
  gone[#gone + 1] = id
end
-- An idle time of 0 ms also marks an entry that was delivered at a time still to come, because the clock was set back:
-- it would not be found for as long as the step. Touched, it counts as idle from now on. An entry that Redis >= 7 does
-- not claim it has dropped, because its body is gone.
for _, row in ipairs(rows) do
  if row[3] == 0 and #redis.call('XCLAIM', stream, group, row[2], '0', row[1], 'JUSTID') == 0 then
    body_is_gone(row[1])
  end
end
local found = redis.call('XAUTOCLAIM', stream, group, ARGV[2], ARGV[3], ARGV[4], 'COUNT', count, 'JUSTID')
for _, id in ipairs(found[2]) do
  local gets_back = owners[id] and owners[id] ~= '' and not has_room()
  local fields = not gets_back and body_of(stream, id)
  if gets_back then -- the next call begins here
    redis.call('XCLAIM', stream, group, owners[id], '0', id, 'IDLE', idle_ms[id], 'JUSTID')
    following = following or id
  elseif fields then
    local n = #taken
    taken[n + 1], taken[n + 2], taken[n + 3] = id, fields, owners[id] or ''
    taken[n + 4] = redis.call('HGET', KEYS[3], id) or '0'
  else
    body_is_gone(id) -- before 7.0 the entry stays in the pending list
  end
end
for _, id in ipairs(found[3] or {}) do body_is_gone(id) end
return {following or found[1], taken, gone}
