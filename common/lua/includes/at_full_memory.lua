-- Let the writes of this script pass when memory is full. Redis >= 7 reads the flag in the #!lua line that
-- common/redis/scripts.py puts in front; 6.2 lets a script run to its end once it has made a write that needs no
-- memory, and this one, which deletes nothing, is such a write.
local function at_full_memory(hash_key)
  redis.call('HDEL', hash_key, '')
end
