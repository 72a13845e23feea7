-- end_by_rule: entries that the leader has parked become dead letters, because a live rule says so.
-- KEYS: 1 stream, 2 leader, 3 tickets, 4 dead, 5 attempts, 6 counters
-- ARGV: 1 group, 2 epoch, 3 version of the rules that the leader knows, then for each ticket: ticket, the record's head
--       as memory has it ("" = no record, else "returned <fence>" or "waits@<ms> <fence>"), the error text of the
--       letters, its ids in id order, separated by spaces
-- Returns: {"FENCED"}, {"RULES", ""} (they have changed: nothing happened), or {"OK", {of each ticket how many of its
--          ids, from the first one, are over now; or -1: its record is another one, and nothing happened}}: fewer than
--          given where bodies are large
-- Why Lua: letter, XACK and index are one step; and a rule that was lifted a moment ago ends nothing any more.
--          Repeating the call writes nothing more: entries that are not pending under `master` are left alone.
-- Memory: works when full
--- @include leads
--- @include records
--- @include bodies
--- @include letter
--- @include at_full_memory
if not leads(KEYS[2], ARGV[2]) then return {'FENCED'} end
if (redis.call('HGET', KEYS[6], 'rules') or '') ~= ARGV[3] then return {'RULES', ''} end
local stream, group, tickets_key = KEYS[1], ARGV[1], KEYS[3]
redis.call('XLEN', KEYS[4]) -- what is of another type fails here, before anything has changed
redis.call('HLEN', KEYS[5])
redis.call('XPENDING', stream, group)
at_full_memory(tickets_key)
local now = now_ms()

local function end_ticket(ticket, believed, error, ids)
  local record = redis.call('HGET', tickets_key, ticket)
  local owner, fence, named
  if record then owner, fence, named = read_record(record) end
  local head = owner and owner .. ' ' .. fence or ''
  if record and not owner or head ~= believed or owner and not is_given_back(owner) then
    return -1
  end
  local over, ended = {}, 0
  for id in string.gmatch(ids, '%S+') do
    if not has_room() then break end
    if #redis.call('XPENDING', stream, group, id, id, 1, 'master') == 1 then
      local body = body_of(stream, id)
      local starts = string.match(redis.call('HGET', KEYS[5], id) or '', '^%d+') or '0'
      local reason = body and 'rule' or 'body_gone'
      bury(KEYS[4], id, ticket, reason, error, starts, 'master', now, now, body or nil, {fence = fence})
      redis.call('XACK', stream, group, id)
      redis.call('HDEL', KEYS[5], id)
      spend(body and size_of(body) or 0) -- written too
    end
    over[id], ended = true, ended + 1
  end
  if owner then write_record(tickets_key, ticket, owner, fence, without(named, over)) end
  return ended
end

local reply = {}
for at = 4, #ARGV, 4 do reply[at / 4] = end_ticket(ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3]) end
return {'OK', reply}
