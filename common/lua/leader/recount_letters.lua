-- recount_letters: one page of making the index of the dead letters anew, where it does not have as many as there are:
--                  letters were deleted or added by hand, or the index was.
-- KEYS: 1 dead, 2 leader, 3 letters
-- ARGV: 1 epoch, 2 id of the letter to go on behind ("": begin, if the numbers differ at all), 3 count
-- Returns: {"FENCED"} or {"OK", id of the letter to go on behind ("": nothing is left to be done)}
-- Why Lua: a letter that comes or goes meanwhile is counted once. Until the end the numbers differ, which is told; and
--          should it not come to the end, the next leader finds that.
-- Memory: works when full
--- @include leads index bodies letter
--- @numbers count 3
if not leads(KEYS[2], ARGV[1]) then return {'FENCED'} end
local number = redis.call('XLEN', KEYS[1])
if ARGV[2] == '' then
  if number == count_letters('[m', '(n') then return {'OK', ''} end
  redis.call('DEL', letters_key)
end
redis.call('XDEL', KEYS[1], '0-0') -- deletes nothing: a write that needs no memory goes first (see at_full_memory)
local start = ARGV[2] == '' and '-' or '(' .. ARGV[2]
local is_all, _, last = each_entry('XRANGE', KEYS[1], start, '+', tonumber(ARGV[3]), function(id, flat)
  local head = {}
  for at = 1, #flat - 1, 2 do
    head[flat[at]] = head[flat[at]] or flat[at + 1]
    if flat[at] == 'usher-fields' then break end
  end
  index_letter(id, head)
end)
return {'OK', not is_all and last or ''}
