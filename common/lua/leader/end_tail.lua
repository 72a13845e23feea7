-- end_tail: entries that the leader has parked behind a dead letter of policy `tail` become dead letters too.
-- KEYS: 1 stream, 2 leader, 3 tickets, 4 dead
-- ARGV: 1 group, 2 epoch, 3 ticket, 4 the record's head as memory has it ("tail <fence>"), 5 "1" when these are the
--       last ones, then ids
-- Returns: {"FENCED"}, {"OK", number of the ids, from the first one, that are over now}: fewer than given where bodies
--          are large; or {"OTHER", 0}: the record is another one, and nothing happened
-- Why Lua: letter and XACK are one step; the record goes with the last of them, so that a leader that dies in between
--          leaves the rest to its successor. Repeating the call writes nothing more.
-- Memory: works when full
--- @include leads
--- @include records
--- @include bodies
--- @include letter
--- @include at_full_memory
if not leads(KEYS[2], ARGV[2]) then return {'FENCED'} end
redis.call('XLEN', KEYS[4]) -- what is no stream fails here, before anything has changed
local stream, group, ticket = KEYS[1], ARGV[1], ARGV[3]
local owner, fence = read_record(redis.call('HGET', KEYS[3], ticket) or '')
if not owner or owner .. ' ' .. fence ~= ARGV[4] then return {'OTHER', 0} end
at_full_memory(KEYS[3])
local ended, now = 0, now_ms()
for at = 6, #ARGV do
  if not has_room() then return {'OK', ended} end
  local id = ARGV[at]
  if #redis.call('XPENDING', stream, group, id, id, 1, 'master') == 1 then
    local body = body_of(stream, id)
    local more = {policy = 'tail', fence = fence}
    bury(KEYS[4], id, ticket, body and 'behind_dead_letter' or 'body_gone', '', '0', 'master', now, now, body, more)
    redis.call('XACK', stream, group, id)
    spend(body and size_of(body) or 0) -- written too
  end
  ended = ended + 1
end
if ARGV[5] == '1' then redis.call('HDEL', KEYS[3], ticket) end
return {'OK', ended}
