-- The index record of a ticket in processing: "<owner> <fence> <id> <id> ...", ids in the order of their hand-over.
-- The owner is an incarnation, or one of the words `returned` (given back by a drain, or redriven), `halted` (its first id waits for an
-- operator, pending under `halted`; the others are under `master`) and `tail` (its id is the last that is to be ended, see dead_letter).
local function read_record(record)
  return string.match(record, '^(%S+) (%d+) (.*)$')
end

local function split_ids(ids)
  local list = {}
  for id in string.gmatch(ids, '%S+') do list[#list + 1] = id end
  return list
end

-- Store what is left of a ticket's record; a ticket without ids in processing has no record.
local function write_record(tickets_key, ticket, owner, fence, ids)
  if ids == '' then
    redis.call('HDEL', tickets_key, ticket)
  else
    redis.call('HSET', tickets_key, ticket, owner .. ' ' .. fence .. ' ' .. ids)
  end
end

-- `ids` without those that are keys of `gone`.
local function without(ids, gone)
  local left = {}
  for id in string.gmatch(ids, '%S+') do
    if not gone[id] then left[#left + 1] = id end
  end
  return table.concat(left, ' ')
end
