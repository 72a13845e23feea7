-- The index records of `n` tickets, which stand in `args` from `first` on: a record, or false, for each. Needs in_chunks.
local function records_of(tickets_key, args, first, n)
  local records = {}
  in_chunks(n, function(from, to)
    local found = redis.call('HMGET', tickets_key, unpack(args, first + from - 1, first + to - 1))
    if n == #found then
      records = found
    else
      for i = 1, #found do records[from + i - 1] = found[i] end
    end
  end)
  return records
end
