-- Return true when this group is the only reader of the stream: no other group exists, nor one that was lost and will
-- read again, nor a log consumer that has noted a checkpoint. Only then may a finished entry leave the stream: other
-- readers have not read it.
local function reads_alone(stream, group, groups_key, checkpoints_key)
  local others = redis.call('HLEN', groups_key) - (redis.call('HGET', groups_key, group) and 1 or 0)
  return others == 0 and #redis.call('XINFO', 'GROUPS', stream) == 1 and redis.call('HLEN', checkpoints_key) == 0
end
