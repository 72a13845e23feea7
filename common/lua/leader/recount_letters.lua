-- recount_letters: one page of making the index of the dead letters anew, where it does not have as many as there are:
--                  letters were deleted or added by hand, or the index was.
-- KEYS: 1 dead, 2 leader, 3 letters, 4 new letters
-- ARGV: 1 epoch, 2 id of the letter to go on behind ("": begin, if the numbers differ at all), 3 count
-- Returns: {"FENCED"} or {"OK", id of the letter to go on behind ("": nothing is left to be done)}
-- Why Lua: it is made under a key of its own, oldest first: what comes meanwhile is met at the end, and redrive
--          takes out of it what goes. The last page puts it in the place of the other.
-- Memory: refused when full
--- @numbers count 3
if not leads(KEYS[2], ARGV[1]) then return {'FENCED'} end
redis.call('SETRANGE', KEYS[2], 0, '') -- changes nothing: a full Redis 6.2 refuses it, as nothing else here
local recounted_key = letters_key
if ARGV[2] == '' then
  letters_key = KEYS[3]
  if is_whole(KEYS[1]) then return {'OK', ''} end
  letters_key = recounted_key
  redis.call('UNLINK', letters_key)
end
local start = ARGV[2] == '' and '-' or '(' .. ARGV[2]
local is_all, _, last = each_entry('XRANGE', KEYS[1], start, '+', tonumber(ARGV[3]), function(id, flat)
  index_letter(id, (head_of(flat)))
end)
if not is_all then return {'OK', last} end
redis.call('UNLINK', KEYS[3])
if redis.call('EXISTS', letters_key) == 1 then redis.call('RENAME', letters_key, KEYS[3]) end
return {'OK', ''}
