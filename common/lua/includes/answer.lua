-- Tell the caller of a message (Producer.call) what became of it. pcall: an address that cannot be written to must not
-- hold the message up. Only the caller reads its stream, and trims it. Returns why it was not told, or nil.
local function answer(reply_key, call, ...)
  local unread = redis.pcall('XLEN', reply_key) -- below these numbers it has not so much
  local is_much = #select(-1, ...) > 4096 or (type(unread) == 'number' and unread > 65536)
  local used = is_much and redis.pcall('MEMORY', 'USAGE', reply_key)
  if type(used) == 'number' and used > 268435456 then return 'its caller has left 256 MiB of answers unread' end
  local told = redis.pcall('XADD', reply_key, 'MAXLEN', '~', '100000', '*', 'call', call, ...)
  if type(told) == 'table' and told.err then return told.err end
  redis.pcall('PEXPIRE', reply_key, '600000')
end
