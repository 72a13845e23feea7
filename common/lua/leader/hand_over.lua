-- hand_over: the one way to an owner: entries change owner, the index and the inboxes of the new owners say so. New
--            entries are in nobody's list yet: the leader has read them (XREADGROUP ... NOACK), or a notification
--            showed them, which it reads right behind this script, in the same transaction. All of them are taken here,
--            those that get no owner by `master`.
-- KEYS: 1 stream, 2 leader, 3 tickets, 4 counters, 5 dead, 6 taken, then for each target: its lease, its inbox
-- ARGV: 1 group, 2 epoch, 3 lowest id of the call, 4 highest id
--       5 the version of the live rules that the plan was made by
--       6 what separates tickets in an inbox record (common/redis/replies.py: separator)
--       7 the ids of all tickets, of each in id order, 8 how many of them each ticket has (JSON: one long argument
--       costs less than many)
--       9 the id up to which all was taken before the new entries; "" if the leader reads nothing now, and has nothing
--       new
--       10 the last id of the new entries ("": there are none), 11 those of them that are not in the plan, 12 those of
--       the plan that are not new (both JSON)
--       13 the digest of the new entries, if a notification brought them over another connection
--       (master/leader/entries.py: digest_of); "" if the group was given them
--       then the tickets, all target by target
--       then for each target: its incarnation; how many of its tickets have no record, as the plan believes; how many
--       have one (they stand behind the former); and for each of these the head of its record, as the plan believes:
--       "<owner> <fence>"; then the bodies of its ids that come with the inbox (master/leader/entries.py), "" for none
-- Inbox: one record per target: fence (of the call, or ""), between (what separates the tickets), tickets, and ids: for
--        each ticket a line with its ids, separated by spaces; before them the ticket's fence, if it is not that of the
--        call. Then bodies, if there are any: of entries, in id order, that may also be such as were refused
--        (common/redis/replies.py: pack_bodies); a body never changes, so it does not matter when it was looked at
-- Returns: {"FENCED"}, {"RULES", ""} (they have changed: nothing happened), {"MOVED", the last id that the group was
--          given} (what a notification brought is not what comes next: nothing happened), or {"OK", fence of this call
--          or "", number of entries that were cut from the stream unread, before what the group is given
--          next, {those of the refused tickets of which an entry is missing from the pending
--          list: nobody of ours has ended it, as restore says}, bytes of the newest entry of the stream, then for each
--          target:
--          {state, {refused tickets}, {ids that are over: their body is gone, or they are not pending},
--           {tickets believed owned that had no record any more: they got the call's fence}}}
--          state: OK | LOST (no lease) | DRAINING | REVOKED | STRAY (an id is pending for another name than `master`);
--          all but OK refuse the target's whole part. Refused new entries are then pending under `master`.
-- An entry that was deleted since it was read becomes a dead letter if it is in the plan; else it counts as cut unread.
-- Why Lua: the owner of an entry (pending list), the owner of a ticket (index) and an owner's work (inbox) change
--          together or not at all. Checks first, writes last: a script is not rolled back.
-- Memory: refused when full
--- @include leads util group records bodies letter numbers
--- @numbers
if not leads(KEYS[2], ARGV[2]) then return {'FENCED'} end
if (redis.call('HGET', KEYS[4], 'rules') or '') ~= ARGV[5] then return {'RULES', ''} end
local stream, group, tickets_key, args, between, position = KEYS[1], ARGV[1], KEYS[3], ARGV, ARGV[6], ARGV[9]
local has_news, is_heard = ARGV[10] ~= '', ARGV[13] ~= ''
local reads = position ~= '' -- only then has the caller nothing in hand but the new entries
local facts = reads and group_facts(stream, group)
if is_heard and facts['last-delivered-id'] ~= position then return {'MOVED', facts['last-delivered-id']} end
local concat, gmatch, match = table.concat, string.gmatch, string.match
local STATES = {live = 'OK', draining = 'DRAINING', revoked = 'REVOKED'}

-- 1. Read the index record of every ticket, and the entries pending under `master` between the lowest and the highest
--    id. No new entry is pending, unless the group was set back by hand or an entry claimed ahead of it; then the entry
--    is taken from its holder, as by XREADGROUP.
local ids, sizes = cjson.decode(ARGV[7]), cjson.decode(ARGV[8])
check_sizes(sizes, #ids)
local for_master, old = cjson.decode(ARGV[11]), {} -- new ids that `master` gets; ids of the plan that are not new
local tickets_at = 13 -- ticket number i is args[tickets_at + i], its record is records[i]
local records = records_of(tickets_key, args, tickets_at + 1, #sizes)
local parked = {}
local complete = false
local seen = #ids + #for_master -- number of new entries
for _, id in ipairs(cjson.decode(ARGV[12])) do old[id], seen = true, seen - 1 end
if is_heard then
  -- Another connection may have been to another server, with other entries, or others of the same ids. Here they must
  -- be exactly the next entries, up to the last of them.
  local parts = {}
  local function digest(part) parts[#parts + 1] = #part .. ':' .. part end
  for _, entry in ipairs(redis.call('XRANGE', stream, '(' .. position, args[10], 'COUNT', seen + 1)) do
    digest(entry[1])
    for _, part in ipairs(entry[2]) do digest(part) end
  end
  if redis.sha1hex(concat(parts)) ~= args[13] then return {'MOVED', position} end
end
if #ids > 8 and (not has_news or next(old)) then -- to ask for each of few costs less than thousands parked in between
  local limit = 2 * #ids + 8
  local rows = redis.call('XPENDING', stream, group, ARGV[3], ARGV[4], limit, 'master')
  for i = 1, #rows do parked[rows[i][1]] = true end
  complete = #rows < limit
end
local function is_parked(id, elsewhere)
  -- Many more may be parked in between than are handed over now; then ask for each id, as for an id from elsewhere.
  if not parked[id] and (elsewhere or not complete) then
    parked[id] = #redis.call('XPENDING', stream, group, id, id, 1, 'master') == 1
  end
  return parked[id]
end

-- 2. Per target and ticket: may it be handed over?
-- For a ticket that has a record, return: may the target have it, the fence that it keeps (if any), and the ids that
-- were given back.
local function may_have(name, record, believed)
  local owner, fence, ids = read_record(record)
  if not owner or believed ~= owner .. ' ' .. fence then return false end
  if owner == name then return true, fence end
  local due_ms = due_ms_of(owner)
  return owner == 'returned' or due_ms and due_ms <= tonumber(now_ms()), false, ids
end

-- Pending for nobody, although the group was given it and its body is there. Without room for that body it counts as
-- missing unseen.
local missing = {}
local function was_given(id)
  facts = facts or group_facts(stream, group)
  return not is_above(id, facts['last-delivered-id'])
end
local function is_missing(id)
  if not (nobody_has(stream, group, id) and was_given(id)) then return false end
  return not has_room() or body_of(stream, id) and true
end

-- Given back: the next owner must begin with the lowest entry that is still pending, or below it.
local function begins_late(returned, first)
  for id in gmatch(returned, '%S+') do
    if is_parked(id, true) or is_missing(id) then return first and is_above(first, id) end
  end
  return false
end

-- Decide about an id: it is claimed, or over, or the target's part ends here.
local function take(target, id)
  if has_news and not old[id] or is_parked(id) then
    target.size = target.size + 1
    target.ids[target.size] = id
  elseif #redis.call('XPENDING', stream, group, id, id, 1) == 0 then
    target.over = target.over or {}
    target.over[id] = true
  else
    target.state = 'STRAY'
  end
end

local function lacks_one(from, to)
  for k = from, to do
    if not (has_news and not old[ids[k]] or is_parked(ids[k])) and is_missing(ids[k]) then return true end
  end
end

-- `master` gets the new entries among these.
local function leave(from, to)
  for k = from, has_news and to or 0 do
    if not old[ids[k]] then for_master[#for_master + 1] = ids[k] end
  end
end

local targets, planned, wants_fence, i, last, at = {}, {}, false, 0, 0, tickets_at + 1 + #sizes
redis.call('XLEN', KEYS[5]) -- what is no stream fails here, before anything has changed; so for each inbox below
for t = 1, (#KEYS - 6) / 2 do
  local name, unowned, others = args[at], whole(args[at + 1], #sizes - i), whole(args[at + 2], #sizes - i)
  -- ids: the claimed ones. For the given tickets: their numbers, their ids as one line, and their fences or false
  local target = {
    name = name, inbox = KEYS[6 + 2 * t], ids = {}, size = 0,
    given = {}, lines = {}, fences = {}, refused = {}, fresh = {}, bodies = args[at + 3 + others],
  }
  targets[t], target.first = target, last + 1
  target.state = STATES[redis.call('GET', KEYS[5 + 2 * t]) or ''] or 'LOST'
  if target.state == 'OK' then
    redis.call('XLEN', target.inbox)
    local n, wants = 0, false
    for p = 1, unowned + others do
      local ticket, record = args[tickets_at + i + p], records[i + p]
      local believed = p > unowned and args[at + 2 + p - unowned]
      local first = last + 1
      last = last + sizes[i + p]
      local granted, fence, returned = not planned[ticket], false, nil -- twice in one plan would be two owners
      planned[ticket] = true
      if granted and record then
        granted, fence, returned = may_have(name, record, believed or '')
      elseif granted and believed then
        -- Nothing of the ticket is in processing: its former owner's acknowledgement came before its report.
        granted = match(believed, '^%S+') == name
      end
      if granted and lacks_one(first, last) then
        granted = false
        missing[#missing + 1] = ticket
      end
      if granted then
        local before = target.size
        for k = first, last do take(target, ids[k]) end
        if returned and begins_late(returned, target.ids[before + 1]) then
          granted = false
          for k = before + 1, target.size do target.ids[k] = nil end
          target.size = before
        end
      end
      if granted then
        n = n + 1
        target.given[n], target.fences[n] = i + p, fence
        target.lines[n] = first == last and ids[first] or concat(ids, ' ', first, last)
        wants = wants or not fence
        if believed and not record then target.fresh[#target.fresh + 1] = ticket end
      else
        target.refused[#target.refused + 1] = ticket
        leave(first, last)
      end
    end
    wants_fence = wants_fence or target.state == 'OK' and wants
  else
    for p = 1, unowned + others do last = last + sizes[i + p] end
  end
  if target.state ~= 'OK' then leave(target.first, last) end
  i, at = i + unowned + others, at + 4 + others
end

-- 3. Write. First a fence is drawn: what refuses writes, refuses this one, before anything has changed. What was taken
--    is noted last: should the script break off before, the next leader is given it again, pending as it is.

-- Claim `size` ids for `name`. Return false when it got all of them, else a set of ids that it got for certain (ask
-- XPENDING about the others). An entry that has no owner yet is claimed with FORCE, if its body is there.
local function claim(name, ids, size)
  local claimed, has = 0, {}
  in_chunks(size, function(from, to)
    local one, two = ids[to + 1], ids[to + 2]
    ids[to + 1], ids[to + 2] = 'JUSTID', 'FORCE'
    local got = redis.call('XCLAIM', stream, group, name, '0', unpack(ids, from, has_news and to + 2 or to + 1))
    ids[to + 1], ids[to + 2] = one, two
    claimed = claimed + #got
    if claimed < to then
      for k = 1, #got do has[got[k]] = true end
    end
  end)
  return claimed < size and has
end

-- Return a ticket's ids without those that are over. Redis >= 7 drops an entry whose body is gone from the pending list
-- instead of claiming it, and an entry that was never given out cannot be claimed: it ends as a dead letter here.
local function those_there(target, ticket, ids, over, has, gone)
  for id in gmatch(ids, '%S+') do
    if over[id] then
      gone[#gone + 1] = id
      -- Its letter is there if one of our scripts found its body gone.
      if was_given(id) and not body_of(stream, id) and not has_letter(KEYS[5], id) then
        bury(KEYS[5], id, ticket, 'body_gone', '', '0', 'master', now_ms(), now_ms(), nil)
      end
    elseif has and not has[id] and #redis.call('XPENDING', stream, group, id, id, 1, target.name) == 0 then
      over[id] = true
      gone[#gone + 1] = id
      bury(KEYS[5], id, ticket, 'body_gone', '', '0', 'master', now_ms(), now_ms(), nil)
    end
  end
  return without(ids, over)
end

local fence = ''
local cut = reads and count_cut(KEYS[4], stream, facts) or 0
if wants_fence then fence = next_number(KEYS[4], 'fence') end
-- What was deleted since the leader has read it, and is in no plan, Redis counts as read.
local there, deleted = claim('master', for_master, #for_master), 0
for _, id in ipairs(there and for_master or {}) do deleted = deleted + (there[id] and 0 or 1) end
count_up(KEYS[4], 'unread_cut', deleted)
local newest = reads and redis.call('XREVRANGE', stream, '+', '-', 'COUNT', 1)[1]
local reply = {'OK', fence, cut + deleted, missing, newest and size_of(newest[2]) or 0}
for _, target in ipairs(targets) do
  local gone = {}
  if target.state == 'OK' then
    local has, over = claim(target.name, target.ids, target.size), target.over
    local record_args, tickets, lines, n, new_head = {}, {}, {}, 0, target.name .. ' ' .. fence .. ' '
    for g = 1, #target.given do
      local number, own = target.given[g], target.fences[g]
      local ticket, line = args[tickets_at + number], target.lines[g]
      if over or has then
        over = over or {}
        line = those_there(target, ticket, line, over, has, gone)
      end
      if line ~= '' then
        n = n + 1
        tickets[n], lines[n] = ticket, own and own .. ' ' .. line or line
        record_args[2 * n - 1], record_args[2 * n] = ticket, own and records[number] .. ' ' .. line or new_head .. line
      elseif not own then
        redis.call('HDEL', tickets_key, ticket)
      end
    end
    in_chunks(2 * n, function(from, to) redis.call('HSET', tickets_key, unpack(record_args, from, to)) end)
    if n > 0 then
      local given, told = concat(tickets, between), concat(lines, '\n')
      local record = {'fence', fence, 'between', between, 'tickets', given, 'ids', told}
      if target.bodies ~= '' then record[9], record[10] = 'bodies', target.bodies end
      redis.call('XADD', target.inbox, '*', unpack(record))
    end
  end
  reply[#reply + 1] = {target.state, target.refused, gone, target.state == 'OK' and target.fresh or {}}
end
-- All up to here was taken, and the group had read so many by then, so that it can be set back (begin). What else it
-- was given, others have read, or skipped by hand.
if reads then
  local given, read = facts['last-delivered-id'], facts['entries-read']
  local at = has_news and (is_heard or is_above(given, args[10])) and args[10] or given
  if is_heard and read then read = read + seen end
  local noted = at .. ' ' .. ((is_heard or at == given) and read and string.format('%.0f', read) or '')
  if has_news or redis.call('GET', KEYS[6]) ~= noted then redis.call('SET', KEYS[6], noted) end
end
return reply
