-- Let the writes of this script pass when memory is full. Redis >= 7 reads the flag in the #!lua line that common/redis/scripts.py puts in
-- front; 6.2 lets a script through to its end once it has made a write that needs no memory, which this one (of nothing) is.
local function at_full_memory(hash_key)
  redis.call('HDEL', hash_key, '')
end
