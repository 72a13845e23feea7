-- share: a master says that it runs, and gets its part of the shards of sources. Each shard has one holder at a time.
--        Of masters that say "gathers_all" one is due all shards: who merges sources must have them all. Masters of
--        a former version, which do not say it, have their part for as long as they run.
-- KEYS: 1 shares
-- ARGV: 1 holder, 2 how long it counts as running, in ms (0: it stops), 3 number of shards, 4 what it says of itself,
--       5 longest time for which any holder counts as running, in ms
-- Returns: {1 if more shards are due to it, which others will give up, else 0, then the shards that it holds}
-- Why Lua: finding a free shard and taking it are one step; two masters must not take the same shard, nor both leave
--          one.
-- Memory: works when full
--- @include at_full_memory
local key, me, lease, count = KEYS[1], ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
at_full_memory(key)
-- A holder that seems to run for longer noted that before the clock was set back, and may be dead; a living one notes
-- it again within a second.
local longest = tonumber(ARGV[5])
local running, holders, names, alone = {}, {}, {}, nil
local function gathers_all(says) return string.find(says, '"gathers_all":true', 1, true) end
local stored = redis.call('HGETALL', key)
for at = 1, #stored, 2 do
  local kind, name = string.match(stored[at], '^(%a+) (.+)$')
  if kind == 'shard' then
    holders[name] = stored[at + 1]
  elseif kind == 'master' then
    local until_ms = tonumber(string.match(stored[at + 1], '^%d+') or '0')
    if name ~= me and until_ms > now and until_ms <= now + longest then
      running[name] = stored[at + 1]
    else
      redis.call('HDEL', key, stored[at])
    end
  end
end
if lease > 0 then
  running[me] = ARGV[4]
  redis.call('HSET', key, 'master ' .. me, string.format('%.0f', now + lease) .. ' ' .. ARGV[4])
end
for name in pairs(running) do names[#names + 1] = name end
table.sort(names)
local due = 0
for rank, name in ipairs(names) do
  if gathers_all(running[name]) then alone = alone or name end
  if name == me then due = math.floor(count / #names) + (rank <= count % #names and 1 or 0) end
end
if lease > 0 and gathers_all(ARGV[4]) then due = alone == me and count or 0 end
local mine, free = {}, {}
for n = 0, count - 1 do
  local shard = tostring(n)
  if holders[shard] == me then mine[#mine + 1] = shard
  elseif not running[holders[shard] or ''] then free[#free + 1] = shard end
end
while #mine > due do redis.call('HDEL', key, 'shard ' .. table.remove(mine)) end
for _, shard in ipairs(free) do
  if #mine >= due then break end
  redis.call('HSET', key, 'shard ' .. shard, me)
  mine[#mine + 1] = shard
end
return {#mine < due and 1 or 0, unpack(mine)}
