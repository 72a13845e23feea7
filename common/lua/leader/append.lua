-- append: what the owners of tickets are handed stands in the records of these, behind what they have in processing. It
--         is a part of the leader's turn, whose other commands say what is handed over (leader_scripts.py: turn).
-- KEYS: 1 tickets
-- ARGV: for each ticket: ticket, the head of its record as memory has it: "<owner> <fence>", ids, separated by spaces
-- Returns: "OK"
-- Why Lua: acknowledgements shorten the records meanwhile. A record that is gone was acknowledged before its report.
-- Memory: refused when full
--- @include util
--- @numbers
local tickets, records = {}, {}
for at = 1, #ARGV, 3 do tickets[#tickets + 1] = ARGV[at] end
in_chunks(#tickets, function(from, to)
  local found = redis.call('HMGET', KEYS[1], unpack(tickets, from, to))
  for n = from, to do
    local head, ids, record = ARGV[3 * n - 1] .. ' ', ARGV[3 * n], found[n - from + 1]
    local is_its = record and string.sub(record, 1, #head) == head
    records[2 * n - 1], records[2 * n] = tickets[n], is_its and record .. ' ' .. ids or head .. ids
  end
end)
in_chunks(#records, function(from, to) redis.call('HSET', KEYS[1], unpack(records, from, to)) end)
return 'OK'
