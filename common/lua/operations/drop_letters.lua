-- drop_letters: dead letters are thrown away for good; a ticket that waited for one goes on without it.
-- KEYS: 1 stream, 2 tickets, 3 dead, 4 attempts, 5 changed, 6 leader, 7 new letters, 8 letters
-- ARGV: 1 group, then ids of letters
-- Returns: {what the leader key holds, or "", then for each letter, from the first one (fewer than given where they are
--          large): {"DROPPED"}, {"RELEASED"}: its ticket goes on with
--          its next message, {"GONE"}: there is no such letter (any more), or {"HELD"}: its ticket has an owner, try
--          again later}. GONE and HELD change nothing.
-- Why Lua: letter, entry and the ticket's record go together, for any caller and under any leader.
-- Memory: works when full
local stream, group, tickets_key = KEYS[1], ARGV[1], KEYS[2]
redis.call('XLEN', KEYS[3]) -- what is no stream fails here, before anything has changed
redis.call('XLEN', KEYS[5])
redis.call('HLEN', KEYS[4])
at_full_memory(tickets_key)

local function drop(letter_id)
  local letter = read_letter(KEYS[3], letter_id)
  if not letter then return {'GONE'} end
  local head = letter.head
  local place, fence, tail = place_of(stream, group, tickets_key, head)
  if place == 'elsewhere' then return {'HELD'} end
  if place == 'halted' then
    write_record(tickets_key, head['usher-ticket'], 'returned', fence, tail)
    redis.call('XACK', stream, group, head['usher-id'])
    redis.call('HDEL', KEYS[4], head['usher-id'])
    tell_leader(KEYS[5], head['usher-ticket'])
  end
  remove_letter(KEYS[3], letter_id, head, KEYS[7])
  return {place == 'halted' and 'RELEASED' or 'DROPPED'}
end

local reply = {redis.call('GET', KEYS[6]) or ''}
for at = 2, #ARGV do
  if not has_room() then break end
  reply[at] = drop(ARGV[at])
end
return reply
