-- The index record of a ticket: "<owner> <fence> <id> <id> ...", ids in the order of their hand-over. All that its
-- owner has of it is among them; those that are pending for nobody are over, and an acknowledgement does not change the
-- record: the leader does, when all is over, when more is handed over, and from time to time.
-- The owner is an incarnation, or one of the words `returned` (given back by a drain or a recall, or redriven),
-- `halted` (its first id waits for an operator, pending under `halted`; the others are under `master`) and
-- `waits@<ms>` (given back until that time, by Redis' clock).
-- Return the record of a ticket, false if it has none, and its three parts: nil also where it cannot be read.
local function record_of(tickets_key, ticket)
  local record = redis.call('HGET', tickets_key, ticket)
  return record, string.match(record or '', '^(%S+) (%d+) (.*)$')
end

-- Return when a ticket goes on that was given back until then, in ms of Redis' clock; nil: its owner is no such word.
local function due_ms_of(owner)
  return tonumber(string.match(owner, '^waits@(%d+)$'))
end

local function split_ids(ids)
  local list = {}
  for id in string.gmatch(ids, '%S+') do list[#list + 1] = id end
  return list
end

-- Store what is left of a ticket's record; a ticket with no id in processing has no record.
local function write_record(tickets_key, ticket, owner, fence, ids)
  if ids == '' then
    redis.call('HDEL', tickets_key, ticket)
  else
    redis.call('HSET', tickets_key, ticket, owner .. ' ' .. fence .. ' ' .. ids)
  end
end

-- Return `ids` without those that are keys of `gone`.
local function without(ids, gone)
  local left = {}
  for id in string.gmatch(ids, '%S+') do
    if not gone[id] then left[#left + 1] = id end
  end
  return table.concat(left, ' ')
end

-- Claim what is pending of these ids for `master`. Return those that are under it now, in id order, and a table of
-- those that are over.
local function claim_all(stream, group, held)
  local ids, over, is_sorted = split_ids(held), {}, true
  for at = 2, #ids do is_sorted = is_sorted and is_above(ids[at], ids[at - 1]) end
  if not is_sorted then table.sort(ids, function(one, other) return is_above(other, one) end) end
  for _, id in ipairs(ids) do over[id] = true end
  for from = 1, #ids, 4000 do -- unpack() puts every value on Lua's C stack, which ends at about 8,000
    local command = {'XCLAIM', stream, group, 'master', '0', unpack(ids, from, math.min(from + 3999, #ids))}
    command[#command + 1] = 'JUSTID'
    for _, id in ipairs(redis.call(unpack(command))) do over[id] = nil end
  end
  return without(table.concat(ids, ' '), over), over
end
