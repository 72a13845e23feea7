-- stream_own: a plain reader (common/readers/reliable_stream.py) does something with entries of its own. `ack`: they
--             are done. `bury`: they become dead letters. `charge`: their failed attempts are noted, and survive its
--             process. `pass`: they are not idle, or are given back, and idle at once for all readers.
-- KEYS: 1 stream, 2 dead, 3 attempts, 4 checkpoints, 5 groups of the stream, 6 letters
-- ARGV: 1 group, 2 reader, 3 what, 4 to pass: who has them afterwards; to ack and to bury: "1" to remove them from the
--       stream as well, else "", 5 to pass: idle time in ms; then for each its id, and to charge: attempts that failed
--       so far; to bury: reason, error, attempts, first start in ms, last start in ms
-- Returns: for each id, from the first one, 1 (done by this call) or 0 (not pending for this reader: done before, or
--          another reader has it): fewer than given where bodies are large
-- Why Lua: XACK and XCLAIM do not check the owner. Letter, XACK and XDEL are one step: a crash in between would lose
--          the message or keep it in two places, and an entry that is removed but not acknowledged would haunt the
--          pending list. It is removed only while no other group reads the stream (reads_alone), and to bury only if
--          its letter has all of it: else it could not be redriven. JUSTID: no delivery.
-- Memory: works when full
--- @numbers large 5
local stream, group, reader, what = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
if what == 'bury' then redis.call('XLEN', KEYS[2]) end -- what is no stream fails here, before anything has changed
at_full_memory(KEYS[3])
-- Others: another group, one that was lost and will read again, a log consumer that has noted a checkpoint.
local function reads_alone()
  local others = redis.call('HLEN', KEYS[5]) - (redis.call('HGET', KEYS[5], group) and 1 or 0)
  return others + redis.call('HLEN', KEYS[4]) == 0 and #redis.call('XINFO', 'GROUPS', stream) == 1
end
local removes = what ~= 'pass' and ARGV[4] == '1' and reads_alone()
local function over(id, has_all)
  redis.call('XACK', stream, group, id)
  if removes and has_all then redis.call('XDEL', stream, id) end
  redis.call('HDEL', KEYS[3], id)
end

local steps = {}
function steps.ack(id) over(id, true) end
function steps.pass(id) redis.call('XCLAIM', stream, group, ARGV[4], '0', id, 'IDLE', ARGV[5], 'JUSTID') end
function steps.charge(id, at) redis.call('HSET', KEYS[3], id, ARGV[at + 1]) end
function steps.bury(id, at)
  local fields = body_of(stream, id)
  local reason = fields and ARGV[at + 1] or 'body_gone'
  local error, attempts, first_ms, last_ms = unpack(ARGV, at + 2, at + 5)
  local has_all = bury(KEYS[2], id, '', reason, error, attempts, reader, first_ms, last_ms, fields)
  spend(fields and size_of(fields) or 0) -- written too
  over(id, has_all)
end

local reply = {}
for at = 6, #ARGV, ({charge = 2, bury = 6})[what] or 1 do
  if not has_room() then break end
  local is_own = #redis.call('XPENDING', stream, group, ARGV[at], ARGV[at], 1, reader) == 1
  if is_own then steps[what](ARGV[at], at) end
  reply[#reply + 1] = is_own and 1 or 0
end
return reply
