-- trim: cut a stream below an id, if really nobody needs what lies there.
-- KEYS: 1 stream, 2 checkpoints, 3 archived
-- ARGV: 1 id (it and all above is kept), 2 most entries to cut in this call, 3 "1": cut only what is archived, else ""
-- Returns: {"CUT", number of entries} or {"NEEDED", who needs entries below the id}
-- Why Lua: looking and cutting are one step, so that a group or a log consumer that appears, or goes back, in between loses nothing.
-- Memory: works when full
--- @include is_below
local floor = ARGV[1]
for _, group in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  local facts = {}
  for at = 1, #group, 2 do facts[group[at]] = group[at + 1] end
  local oldest = redis.call('XPENDING', KEYS[1], facts['name'], '-', '+', 1)[1]
  if is_below(facts['last-delivered-id'], floor) or (oldest and is_below(oldest[1], floor)) then
    return {'NEEDED', 'group ' .. facts['name']}
  end
end
local noted = redis.call('HGETALL', KEYS[2])
for at = 1, #noted, 2 do
  local id = string.match(noted[at + 1], '^%d+ (%d+%-%d+) ')
  if not id or is_below(id, floor) then return {'NEEDED', 'checkpoint ' .. noted[at]} end
end
local archived = redis.call('GET', KEYS[3])
if (archived and is_below(archived, floor)) or (not archived and ARGV[3] == '1') then return {'NEEDED', 'archive'} end
return {'CUT', redis.call('XTRIM', KEYS[1], 'MINID', '~', floor, 'LIMIT', ARGV[2])}
