-- forget_attempts: delete, in one page of noted attempts or errors, those of messages that are no longer pending. A
--                  message that the group is still to be given is not pending either: after the group was lost it comes
--                  a second time, and keeps its attempts.
-- KEYS: 1 stream, 2 leader, 3 attempts, or errors (whose fields may begin with `t` or `h`), 4 taken
-- ARGV: 1 group, 2 epoch, 3 cursor ("0" at first), 4 count
-- Returns: {"FENCED"} or {"OK", next cursor ("0": that was all), {fields that went}}
-- Why Lua: an acknowledgement takes its message's attempts with it, and a dead letter too; but a message may also end
--          by the deletion of its body, in several places. Between our look and the deletion it must not be noted anew.
-- Memory: works when full
--- @numbers count 4
if not leads(KEYS[2], ARGV[2]) then return {'FENCED'} end
local page = redis.call('HSCAN', KEYS[3], ARGV[3], 'COUNT', ARGV[4])
if #page[2] == 0 then return {'OK', page[1], {}} end
local delivered = group_facts(KEYS[1], ARGV[1])['last-delivered-id']
local taken = string.match(redis.call('GET', KEYS[4]) or '', '^%d+%-%d+')
if taken and is_above(delivered, taken) then delivered = taken end
local function may_come(id) return is_above(id, delivered) and (not has_room() or body_of(KEYS[1], id)) end
local gone = {}
for at = 1, #page[2], 2 do
  local field = page[2][at]
  local id = string.gsub(field, '^[th]', '')
  local is_id = string.find(id, '^%d+%-%d+$')
  if not is_id or (#redis.call('XPENDING', KEYS[1], ARGV[1], id, id, 1) == 0 and not may_come(id)) then
    redis.call('HDEL', KEYS[3], field)
    gone[#gone + 1] = field
  end
end
return {'OK', page[1], gone}
