-- reject: entries that cannot be handed to any owner become dead letters.
-- KEYS: 1 stream, 2 leader, 3 dead, 4 letters
-- ARGV: 1 group, 2 epoch, 3 master, or a dead incarnation: of what it had, only those that were dropped (was_dropped);
--       then for each entry: id, ticket (shown, may be ""), reason
-- Returns: {"FENCED"} or {"OK", number of the entries, from the first one, that are over now}: fewer than given where
--          bodies are large
-- Why Lua: letter and XACK are one step, so that a message is neither lost nor doubled. Repeating the call writes
--          nothing more.
-- Memory: works when full
if not leads(KEYS[2], ARGV[2]) then return {'FENCED'} end
local ended, now = 0, now_ms()
local owner, is_parked = ARGV[3], ARGV[3] == 'master'
for at = 4, #ARGV, 3 do
  if not has_room() then break end
  local id = ARGV[at]
  if is_parked and #redis.call('XPENDING', KEYS[1], ARGV[1], id, id, 1, owner) == 1
    or not is_parked and was_dropped(KEYS[1], ARGV[1], KEYS[3], id) then
    local fields = body_of(KEYS[1], id)
    local more = {cut = ARGV[at + 2] == 'too_large' or ARGV[at + 2] == 'ticket_id_too_long'} -- no setting mends these
    bury(KEYS[3], id, ARGV[at + 1], fields and ARGV[at + 2] or 'body_gone', '', '0', owner, now, now, fields, more)
    redis.call('XACK', KEYS[1], ARGV[1], id)
    spend(fields and not more.cut and size_of(fields) or 0) -- written too
  end
  ended = ended + 1
end
return {'OK', ended}
