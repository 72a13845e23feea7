-- Whether nobody but the one group reads the stream: neither another group, nor a log consumer that has noted a checkpoint. Only then
-- may an entry that is done leave the stream: others have not read it.
local function reads_alone(stream, checkpoints_key)
  return #redis.call('XINFO', 'GROUPS', stream) == 1 and redis.call('HLEN', checkpoints_key) == 0
end
