-- A dead letter, read back: {head = values by name, fields = flat list of the original fields}, or nil when it is not there. See bury.
local function read_letter(dead_key, letter_id)
  local found = redis.call('XRANGE', dead_key, letter_id, letter_id)
  if not found[1] then return nil end
  local flat, head, at = found[1][2], {}, 1
  while at < #flat do
    local name = flat[at]
    head[name] = flat[at + 1]
    at = at + 2
    if name == 'usher-fields' then break end
  end
  local fields = {}
  for i = at, #flat do fields[i - at + 1] = flat[i] end
  return {head = head, fields = fields}
end

-- Where the message of a letter is: "halted" (pending under `halted`, or its ticket's record says so: the ticket waits for it), "elsewhere"
-- (under `halted`, while the record names another owner: nobody may touch it now), or "out" (in no list). With it, what the record says.
local function place_of(stream, group, tickets_key, head)
  -- Somebody may write into the stream of letters by hand: that is no message of a ticket, and must not stop what is done to the others.
  if not head['usher-ticket'] or not string.match(head['usher-id'] or '', '^%d+%-%d+$') then return 'out' end
  local record = redis.call('HGET', tickets_key, head['usher-ticket'])
  local owner, fence, ids
  if record then owner, fence, ids = read_record(record) end
  local id = head['usher-id']
  if owner == 'halted' and string.match(ids, '^%S+') == id then return 'halted', fence, without(ids, {[id] = true}) end
  if head['usher-policy'] ~= 'park' or #redis.call('XPENDING', stream, group, id, id, 1, 'halted') == 0 then return 'out' end
  if record then return 'elsewhere' end
  return 'halted', string.match(head['usher-fence'] or '', '^%d+$') or '0', ''
end
