-- hand_over: the one way out of `master`: entries change owner, the index and the inboxes of the new owners say so.
-- KEYS: 1 stream, 2 leader, 3 tickets, 4 counters, 5 dead, then for each target: its lease, its inbox
-- ARGV: 1 group, 2 epoch, 3 lowest id of the call, 4 highest id, 5 number of ids, 6 number of targets, then for each target:
--       incarnation, number of tickets, and for each ticket: ticket, the record's head as the plan believes it
--       ("" = no record, else "<owner> <fence>"), its ids in id order, separated by spaces;
--       last the version of the live rules that the plan was made by
-- Returns: {"FENCED"}, {"RULES", ""} (they have changed: nothing happened), or {"OK", fence of this call or "", then for each target:
--          {state, {refused tickets}, {ids that are over: their body is gone, or they are pending for nobody},
--           {tickets believed owned that had no record any more: they got the call's fence}}}
--          state: OK | LOST (no lease) | DRAINING | REVOKED | STRAY (an id is pending for somebody else than `master`);
--          all but OK refuse the target's whole part.
-- Why Lua: who owns an entry (pending list), who owns a ticket (index) and what an owner will run (inbox) change together or not at
--          all. Checks first, writes last: a script is not rolled back.
-- Memory: refused when full
--- @include leads
--- @include next_number
--- @include record
--- @include in_chunks
--- @include bury
--- @include is_above
if not leads(KEYS[2], ARGV[2]) then return {'FENCED'} end
local stream, group, tickets_key = KEYS[1], ARGV[1], KEYS[3]
local STATES = {live = 'OK', draining = 'DRAINING', revoked = 'REVOKED'}

-- 1. The plan as it came.
local targets, names, at = {}, {}, 7
for t = 1, tonumber(ARGV[6]) do
  local target = {name = ARGV[at], lease = KEYS[4 + 2 * t], inbox = KEYS[5 + 2 * t], first = #names + 1, parts = {}, refused = {}}
  local count = tonumber(ARGV[at + 1])
  at = at + 2
  for p = 1, count do
    target.parts[p] = {ticket = ARGV[at], believed = ARGV[at + 1], ids = ARGV[at + 2]}
    names[#names + 1] = ARGV[at]
    at = at + 3
  end
  targets[t] = target
end
if (redis.call('HGET', KEYS[4], 'rules') or '') ~= (ARGV[at] or '') then return {'RULES', ''} end

-- 2. What the index says of every ticket, and what is pending under `master` between the lowest and the highest id.
local records = {}
in_chunks(#names, function(from, to)
  local found = redis.call('HMGET', tickets_key, unpack(names, from, to))
  for i = 1, #found do records[from + i - 1] = found[i] end
end)
local parked = {}
local limit = 2 * tonumber(ARGV[5]) + 100
local rows = redis.call('XPENDING', stream, group, ARGV[3], ARGV[4], limit, 'master')
for i = 1, #rows do parked[rows[i][1]] = true end
local complete = #rows < limit
local function is_parked(id, elsewhere)
  -- Many more may be parked in between than are handed over now; then ask for each of the ids. So too for an id from elsewhere.
  return parked[id] or ((elsewhere or not complete) and #redis.call('XPENDING', stream, group, id, id, 1, 'master') == 1)
end

-- 3. Per target and ticket: may it be handed over?
local planned = {}
local function may_have(target, part, record)
  if planned[part.ticket] then return false end -- twice in one plan would be two owners
  planned[part.ticket] = true
  if not record then
    -- Nothing of the ticket is in processing. That its former owner's acknowledgement came before its report is the usual case.
    part.fresh = part.believed ~= ''
    return part.believed == '' or string.match(part.believed, '^%S+') == target.name
  end
  local owner, fence, ids = read_record(record)
  if not owner or part.believed ~= owner .. ' ' .. fence then return false end
  if owner == target.name then
    part.fence, part.before = fence, ids .. ' '
    return true
  end
  part.returned = ids
  return owner == 'returned'
end

-- Given back by a drain: whoever gets the ticket must begin with its lowest entry that is still pending, or below it.
local function begins_late(part, first)
  for id in string.gmatch(part.returned, '%S+') do
    if is_parked(id, true) then return first and is_above(first, id) end
  end
  return false
end

local wants_fence = false
redis.call('XLEN', KEYS[5])
for _, target in ipairs(targets) do
  target.state = STATES[redis.call('GET', target.lease) or ''] or 'LOST'
  target.ids = {}
  if target.state == 'OK' then
    redis.call('XLEN', target.inbox) -- what is no stream fails here, before anything has changed
    for p, part in ipairs(target.parts) do
      if may_have(target, part, records[target.first + p - 1]) then
        local before = #target.ids
        for id in string.gmatch(part.ids, '%S+') do
          if is_parked(id) then
            target.ids[#target.ids + 1] = id
          elseif #redis.call('XPENDING', stream, group, id, id, 1) == 0 then
            part.over = part.over or {}
            part.over[id] = true
          else
            target.state = 'STRAY'
          end
        end
        part.granted = not (part.returned and begins_late(part, target.ids[before + 1]))
        if not part.granted then
          for i = before + 1, #target.ids do target.ids[i] = nil end
        end
      end
      if part.granted then
        target.wants_fence = target.wants_fence or not part.fence
      else
        target.refused[#target.refused + 1] = part.ticket
      end
    end
    wants_fence = wants_fence or target.state == 'OK' and target.wants_fence
  end
end

-- 4. Write. The number comes first: it needs memory, so a full server refuses the call before anything has changed.
local fence = ''
if wants_fence then fence = next_number(KEYS[4], 'fence') end
local reply = {'OK', fence}
for _, target in ipairs(targets) do
  local gone, fresh = {}, {}
  if target.state == 'OK' then
    local claimed = 0
    local has = {}
    in_chunks(#target.ids, function(from, to)
      local command = {'XCLAIM', stream, group, target.name, '0'}
      for i = from, to do command[#command + 1] = target.ids[i] end
      command[#command + 1] = 'JUSTID'
      local got = redis.call(unpack(command))
      claimed = claimed + #got
      if claimed < to then
        for i = 1, #got do has[got[i]] = true end
      end
    end)
    local whole = claimed == #target.ids
    local record_args, inbox_args = {}, {}
    for _, part in ipairs(target.parts) do
      if part.granted then
        local ids = part.ids
        if part.over or not whole then
          -- Redis >= 7 drops an entry whose body is gone from the pending list instead of claiming it: it ends as a dead letter here.
          local over = part.over or {}
          for id in string.gmatch(ids, '%S+') do
            if over[id] then
              gone[#gone + 1] = id
            elseif not has[id] and #redis.call('XPENDING', stream, group, id, id, 1, target.name) == 0 then
              over[id] = true
              gone[#gone + 1] = id
              bury(KEYS[5], id, part.ticket, 'body_gone', '', '0', 'master', now_ms(), now_ms(), nil)
            end
          end
          ids = without(ids, over)
        end
        local mine = part.fence or fence
        if part.fresh then fresh[#fresh + 1] = part.ticket end
        if ids ~= '' then
          local n = #record_args
          record_args[n + 1] = part.ticket
          record_args[n + 2] = target.name .. ' ' .. mine .. ' ' .. (part.before or '') .. ids
          inbox_args[n + 1] = part.ticket
          inbox_args[n + 2] = mine .. ' ' .. ids
        elseif not part.before then
          redis.call('HDEL', tickets_key, part.ticket)
        end
      end
    end
    if #record_args > 0 then
      in_chunks(#record_args, function(from, to) redis.call('HSET', tickets_key, unpack(record_args, from, to)) end)
      in_chunks(#inbox_args, function(from, to) redis.call('XADD', target.inbox, '*', unpack(inbox_args, from, to)) end)
    end
  end
  reply[#reply + 1] = {target.state, target.refused, gone, fresh}
end
return reply
