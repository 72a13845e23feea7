-- recall: ask an incarnation to give tickets back of which it has started nothing, for others have nothing to do. It
--         may have started them by now: then it does not answer.
-- KEYS: 1 leader, 2 tickets, 3 lease and 4 inbox of the incarnation
-- ARGV: 1 group (not used), 2 epoch, 3 incarnation, 4 what separates tickets in an inbox record
--       (common/redis/replies.py: separator), then for each ticket: ticket, the fence that it is believed to have
-- Inbox: one record: recall (1), between (what separates the tickets), tickets, and ids: for each ticket a line with
--        its fence and all ids of its record, separated by spaces: whatever the owner has started of it is among them
-- Returns: {"FENCED"} or {"OK", {tickets that were not asked for: the incarnation has no live lease, or they are not
--          its own under this fence}}
-- Why Lua: an inbox without a lease is deleted, and must not come into being again; and what is outdated already need
--          not be asked for.
-- Memory: refused when full
--- @include leads util records
if not leads(KEYS[1], ARGV[2]) then return {'FENCED'} end
local is_live = redis.call('GET', KEYS[3]) == 'live'
local tickets, lines, unsure = {}, {}, {}
for at = 5, #ARGV, 2 do
  local ticket, record = ARGV[at], redis.call('HGET', KEYS[2], ARGV[at])
  local owner, fence, ids
  if record then owner, fence, ids = read_record(record) end
  if is_live and owner == ARGV[3] and fence == ARGV[at + 1] then
    tickets[#tickets + 1], lines[#lines + 1] = ticket, fence .. ' ' .. ids
  else
    unsure[#unsure + 1] = ticket
  end
end
if #tickets > 0 then
  redis.call('XADD', KEYS[4], '*', 'recall', '1', 'between', ARGV[4], 'tickets', table.concat(tickets, ARGV[4]), 'ids',
    table.concat(lines, '\n'))
end
return {'OK', unsure}
