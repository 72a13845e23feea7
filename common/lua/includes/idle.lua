-- Take idle entries of a page of the pending list for `name`, by XAUTOCLAIM, and call `take(id, fields, owner)` for
-- each, or `lose(id, owner)` where its body is gone. Those for whose owner `is_kept(owner)` stay with it; those for
-- which `comes_later(id)`, or whose bodies find no room, stay for the next call. Return its cursor. XAUTOCLAIM takes an
-- entry from any owner, and does not say from whom: so the owners are read before. It scans 10 x COUNT entries per
-- call: without the cursor, entries beyond that are never found. Where all of these have an owner it claims none: a
-- million parked entries would be as many lines in the append-only file at each pass, and their waiting time would be
-- lost.
local function claim_idle(stream, group, name, idle_ms, cursor, count, is_kept, comes_later, take, lose)
  local rows, owners, idle, has_lost = {}, {}, {}, false
  local function look()
    rows = redis.call('XPENDING', stream, group, cursor, '+', 10 * count)
    for _, row in ipairs(rows) do owners[row[1]], idle[row[1]] = row[2], row[3] end
  end
  look()
  -- An idle time of 0 ms also marks an entry that was delivered at a time still to come, because the clock was set
  -- back: it would not be found for as long as the step. Touched, it counts as idle from now on. An entry that Redis >=
  -- 7 does not claim it has dropped, because its body is gone.
  for _, row in ipairs(rows) do
    if row[3] == 0 and not is_kept(row[2]) then
      if #redis.call('XCLAIM', stream, group, row[2], '0', row[1], 'JUSTID') == 0 then
        has_lost = true
        lose(row[1], row[2])
      end
    end
  end
  if has_lost then look() end -- XAUTOCLAIM reaches as many entries further now: whose are these?
  local least_ms, following = '9007199254740992', nil
  for _, row in ipairs(rows) do
    if row[3] >= tonumber(idle_ms) and not (is_kept(row[2]) or comes_later(row[1])) then least_ms = idle_ms end
  end
  local found = redis.call('XAUTOCLAIM', stream, group, name, least_ms, cursor, 'COUNT', count, 'JUSTID')
  for _, id in ipairs(found[2]) do
    local owner = owners[id] or ''
    if is_kept(owner) then
      if owner ~= name then redis.call('XCLAIM', stream, group, owner, '0', id, 'JUSTID') end
    elseif owner ~= '' and (comes_later(id) or not has_room()) then -- the next call begins here
      redis.call('XCLAIM', stream, group, owner, '0', id, 'IDLE', idle[id], 'JUSTID')
      following = following or id
    else
      local fields = body_of(stream, id)
      if fields then take(id, fields, owner) else lose(id, owner) end -- before 7.0 it stays in the pending list
    end
  end
  for _, id in ipairs(found[3] or {}) do lose(id, owners[id] or '') end -- from 7.0 on Redis has dropped these
  return following or found[1]
end
