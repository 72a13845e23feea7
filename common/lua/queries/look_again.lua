-- look_again: read the state of one suspect of the audit at one moment.
-- KEYS: 1 stream, 2 tickets, 3 lease of the owner, 4 attempts
-- ARGV: 1 group, 2 id, 3 the ticket's field in the index, 4 id of the entry that it is compared with
-- Returns: {owner of the entry or nil, idle in milliseconds, deliveries, record of the ticket or nil, 1 when the lease
--          lives or 0, 1 when the entry is in the stream or 0, its attempts or nil, owner of the other entry or nil};
--          an owner is nil where the entry is not pending; what is no id is neither pending nor in the stream
-- Why Lua: all of it is of one moment, also when memory is full, when Redis takes no MULTI; and the body stays here.
-- Memory: works when full, as nothing is written
local NOWHERE = {false, false, 0, 0}
local function is_id(id) return not redis.pcall('XRANGE', KEYS[1], id, id, 'COUNT', 1).err end
local function pending(id)
  return is_id(id) and redis.call('XPENDING', KEYS[1], ARGV[1], id, id, 1)[1] or NOWHERE
end
local entry = pending(ARGV[2])
local record, lease = redis.call('HGET', KEYS[2], ARGV[3]), redis.call('EXISTS', KEYS[3])
local body = is_id(ARGV[2]) and #redis.call('XRANGE', KEYS[1], ARGV[2], ARGV[2]) or 0
local attempts = redis.call('HGET', KEYS[4], ARGV[2])
return {entry[2], entry[3], entry[4], record, lease, body, attempts, pending(ARGV[4])[2]}
