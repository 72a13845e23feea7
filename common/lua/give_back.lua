-- give_back: a draining incarnation returns whole, quiet tickets: nothing of them runs, nothing waits to be acknowledged.
-- KEYS: 1 stream, 2 lease, 3 tickets
-- ARGV: 1 group, 2 incarnation, then for each ticket: ticket, all its ids in processing in id order, separated by spaces
-- Returns: {"LOST"} (no draining lease; nothing happened) or {"OK", {tickets that were not given back}}
-- Why Lua: entries and index change together. Each ticket is marked `returned` with its ids: hand_over then refuses a plan that
--          would begin with a later entry, made by a leader that does not know yet.
-- Memory: works when full
--- @include record
--- @include at_full_memory
if redis.call('GET', KEYS[2]) ~= 'draining' then return {'LOST'} end
at_full_memory(KEYS[3])
local kept = {}
for at = 3, #ARGV, 2 do
  local ticket, ids = ARGV[at], ARGV[at + 1]
  local record = redis.call('HGET', KEYS[3], ticket)
  local owner, fence, held
  if record then owner, fence, held = read_record(record) end
  local given = split_ids(ids)
  local given_set = {}
  for _, id in ipairs(given) do given_set[id] = true end
  if owner == ARGV[2] and #held == #ids and without(held, given_set) == '' then
    for _, id in ipairs(given) do redis.call('XCLAIM', KEYS[1], ARGV[1], 'master', '0', id, 'JUSTID') end
    redis.call('HSET', KEYS[3], ticket, 'returned ' .. fence .. ' ' .. ids)
  else
    kept[#kept + 1] = ticket
  end
end
return {'OK', kept}
