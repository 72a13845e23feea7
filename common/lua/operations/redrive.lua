-- redrive: dead letters become messages again, each exactly once: its letter goes in the same step. Or they are thrown
--          away for good; a ticket that waited for one goes on without it.
-- KEYS: 1 stream, 2 tickets, 3 dead, 4 attempts, 5 changed, 6 leader, 7 delayed, 8 errors, 9 new letters, 10 letters
-- ARGV: 1 group, 2 redrive | drop | edit, then ids of letters; to edit one id, and the fields of a new message that
--       takes its place
-- Returns: {what the leader key holds, or "", then for each letter, from the first one (fewer than given where they are
--          large): {"RESUMED"}: the ticket waited for it; it goes on with this very message, at its place in the
--          stream, and then with its later ones; {"ADDED", new id}: it is a new message at the end of the stream, with
--          its uid as it was (one whose due_ms was no time: among the delayed messages, due now); {"DROPPED"};
--          {"RELEASED"}: dropped, and its ticket goes on with its next message; {"GONE"}: there is no such letter (any
--          more); {"CUT"}: fields of it are missing, and the stream has the entry no more; {"HELD"}: its ticket has an
--          owner, try again later}. GONE, CUT and HELD change nothing.
-- Why Lua: the entry leaves `halted`, its ticket's record and the letter change together, for any caller and under
--          any leader: the note in `changed` stops a plan that does not know of it. A crash between XADD and XDEL would
--          make two of one.
-- Memory: works when full, since as much goes as comes
local stream, group, tickets_key, what = KEYS[1], ARGV[1], KEYS[2], ARGV[2]
local edited = what == 'edit' and {unpack(ARGV, 4)}
redis.call('XLEN', stream) -- what is no stream fails here, before anything has changed
redis.call('XLEN', KEYS[5])
if what ~= 'drop' then redis.call('XPENDING', stream, group) end -- so does a missing group
redis.call('HLEN', KEYS[4])
at_full_memory(tickets_key)

-- Of several fields of that name the first one counts; an empty uid is none (common/protocol/message.py).
local function give(fields, name, value)
  for at = 1, #fields, 2 do
    if fields[at] == name then
      if name ~= 'uid' or fields[at + 1] == '' then fields[at + 1] = value end
      return
    end
  end
  fields[#fields + 1] = name
  fields[#fields + 1] = value
end

-- The message at the end of the stream. Without a uid of its own it gets its former id as uid: sinks know it by that. A
-- gathered message has the id under which sinks know it in its first field, and a number in its id, which gather counts
-- by.
local function add_again(head, fields)
  local id = string.match(head['usher-id'] or '', '^%d+%-%d+$')
  if id and not edited and (head['usher-fields-cut'] or head['usher-values-cut']) then fields = body_of(stream, id) end
  if not id or not fields or #fields == 0 or #fields > 7000 then return {'CUT'} end
  local to, id_now = stream, '*'
  if head['usher-reason'] == 'unreadable_due_ms' then -- never in a stream: it goes by the way that it came, now
    to = KEYS[7]
    give(fields, 'due_ms', now_ms())
  elseif fields[1] == 'usher_from' then
    local ms, number = end_of(stream)
    id_now = numbered(ms, number + 1)
  else
    give(fields, 'uid', id)
  end
  spend(size_of(fields)) -- written too
  return {'ADDED', redis.call('XADD', to, id_now, unpack(fields))}
end

-- The ticket may move again: first what of it is under `master` already and was held by the former owner.
local function resume(head, fence, tail)
  local id = head['usher-id']
  local ids = tail == '' and id or id .. ' ' .. tail
  redis.call('HSET', tickets_key, head['usher-ticket'], 'returned ' .. fence .. ' ' .. ids)
  redis.call('XCLAIM', stream, group, 'master', '0', id, 'FORCE', 'JUSTID')
  redis.call('HDEL', KEYS[4], id)
  redis.pcall('HDEL', KEYS[8], id, 't' .. id, 'h' .. id)
end

local function redrive(letter_id)
  local letter, fields = body_of(KEYS[3], letter_id), {}
  if not letter then return {'GONE'} end
  local head, first = head_of(letter)
  for at = first, #letter do fields[#fields + 1] = letter[at] end
  local place, fence, tail = place_of(stream, group, tickets_key, head)
  if place == 'elsewhere' then return {'HELD'} end
  local answer
  if what == 'redrive' and place == 'halted' and body_of(stream, head['usher-id']) then
    resume(head, fence, tail)
    answer = {'RESUMED'}
  else
    answer = {place == 'halted' and 'RELEASED' or 'DROPPED'}
    if what ~= 'drop' then answer = add_again(head, edited or fields) end
    if answer[1] == 'CUT' then return answer end
    if place == 'halted' then -- by another message, or none: its place in the ticket's order is gone
      write_record(tickets_key, head['usher-ticket'], 'returned', fence, tail)
      redis.call('XACK', stream, group, head['usher-id'])
      redis.call('HDEL', KEYS[4], head['usher-id'])
    end
  end
  if place == 'halted' then tell_leader(KEYS[5], head['usher-ticket']) end
  remove_letter(KEYS[3], letter_id, head, KEYS[9])
  return answer
end

local reply = {redis.call('GET', KEYS[6]) or ''}
for at = 3, edited and 3 or #ARGV do
  if not has_room() then break end
  reply[at - 1] = redrive(ARGV[at])
end
return reply
