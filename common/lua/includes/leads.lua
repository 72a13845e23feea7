-- Return true when the leader key holds this epoch. Its value is "<epoch> <url>". No key means no: an expired lease is
-- never assumed to be ours.
local function leads(leader_key, epoch)
  local held = redis.call('GET', leader_key)
  return held and string.sub(held, 1, #epoch + 1) == epoch .. ' '
end
