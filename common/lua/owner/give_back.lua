-- give_back: a draining incarnation returns whole, quiet tickets: nothing of them runs, nothing waits to be
--            acknowledged.
-- KEYS: 1 stream, 2 lease, 3 tickets, 4 dead
-- ARGV: 1 group, 2 incarnation, then for each ticket: ticket, all its ids in processing in id order, separated by
--       spaces
-- Returns: {"LOST"} (no draining lease; nothing happened) or {"OK", {tickets that were not given back}}: among
--          these are those that bodies left no room for
-- Why Lua: entries and index change together. Each ticket is marked `returned` with its ids: hand_over then refuses a
--          plan that would begin with a later entry, made by a leader that does not know of it yet. The mark names what
--          is pending under `master` and nothing else: Redis >= 7 drops an entry whose body is gone when it is claimed
--          (here, or by renew or sweep before). What somebody took out of the pending list by hand is claimed again.
-- Memory: works when full
--- @include util
--- @include group
--- @include records
--- @include bodies
--- @include letter
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
  if has_room() and owner == ARGV[2] and #held == #ids and without(held, given_set) == '' then
    local over = {}
    for _, id in ipairs(given) do
      if #redis.call('XCLAIM', KEYS[1], ARGV[1], 'master', '0', id, 'JUSTID') == 0
        and not claim_again(KEYS[1], ARGV[1], 'master', id) then
        if not body_of(KEYS[1], id) then
          bury(KEYS[4], id, ticket, 'body_gone', '', '0', ARGV[2], now_ms(), now_ms(), nil)
        end
        over[id] = true
      end
    end
    write_record(KEYS[3], ticket, 'returned', fence, without(ids, over))
  else
    kept[#kept + 1] = ticket
  end
end
return {'OK', kept}
