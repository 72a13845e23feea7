-- trim: cut a stream below an id, if no reader needs what lies there.
-- KEYS: 1 stream, 2 checkpoints, 3 archived, 4 groups (saved positions)
-- ARGV: 1 id (it and all above is kept), 2 most entries to cut in this call, 3 "1": cut only what is archived, else "",
--       4 of a source, its gather group, else "". While that is gone, or ahead of the stream, it is not known that what
--       lies there was gathered, nor while gather has noted nothing under this name: a copy, or what was renamed,
--       brings its group along, but not what others have noted of what they need.
-- Returns: {"CUT", number of entries} or {"NEEDED", who needs entries below the id}
-- Why Lua: looking and cutting are one step, so that a group or a log consumer that appears, goes back, or is lost in
--          between loses nothing.
-- Memory: works when full
--- @numbers count 2
local floor, is_in_it, is_noted = ARGV[1], ARGV[4] == '', ARGV[4] == ''
for _, group in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  local facts = facts_of(group)
  if facts['name'] == ARGV[4] then
    is_in_it = not is_beyond(KEYS[1], facts)
  end
  local oldest = redis.call('XPENDING', KEYS[1], facts['name'], '-', '+', 1)[1]
  if is_above(floor, facts['last-delivered-id']) or (oldest and is_above(floor, oldest[1])) then
    return {'NEEDED', 'group ' .. facts['name']}
  end
end
local saved = redis.call('HGETALL', KEYS[4])
for at = 1, #saved, 2 do
  local id = string.match(saved[at + 1], '^%d+%-%d+$')
  if not id or is_above(floor, id) then return {'NEEDED', 'the saved position of group ' .. saved[at]} end
  is_noted = is_noted or saved[at] == ARGV[4]
end
if not (is_in_it and is_noted) then return {'NEEDED', 'group ' .. ARGV[4] .. ', which has not gathered it,'} end
local noted = redis.call('HGETALL', KEYS[2])
for at = 1, #noted, 2 do
  local id = string.match(noted[at + 1], '^%d+ (%d+%-%d+) ')
  if not id or is_above(floor, id) then return {'NEEDED', 'checkpoint ' .. noted[at]} end
end
if ARGV[3] == '1' then
  local archived = redis.call('GET', KEYS[3])
  if not archived or is_above(floor, archived) then return {'NEEDED', 'archive'} end
end
return {'CUT', redis.call('XTRIM', KEYS[1], 'MINID', '~', floor, 'LIMIT', ARGV[2])}
