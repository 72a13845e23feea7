-- change_rules: an operator sets or lifts a rule. Nothing is handed over by the former rules from then on: its
--               note in `changed` stops a plan that does not know of it.
-- KEYS: 1 rules, 2 counters, 3 changed, 4 actions
-- ARGV: 1 id of the rule, 2 the rule ("" lifts it), 3 most rules there may be, 4 length of the action log,
--       5 version of the rule that is lifted ("": whichever it is); then names and values for the action log
-- Returns: {"SET", version}, {"REPLACED", version, the former one}, {"LIFTED", version, the former one}, {"NONE"}
--          (no such rule, of this version, to lift) or {"FULL"} (too many rules). NONE and FULL change nothing.
-- Why Lua: rule, version and the line of the action log are one step, so that no reader can see one without the others.
-- Memory: works when full
--- @numbers count 3 4
redis.call('XLEN', KEYS[3]) -- what is no stream fails here, before anything has changed
redis.call('XLEN', KEYS[4])
redis.call('HLEN', KEYS[2])
local id, rule = ARGV[1], ARGV[2]
local former = redis.call('HGET', KEYS[1], id)
if rule == '' and not former then return {'NONE'} end
if rule == '' and ARGV[5] ~= '' and string.match(former, '^%d+') ~= ARGV[5] then return {'NONE'} end
if not former and redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[3]) then return {'FULL'} end
at_full_memory(KEYS[1])
local version = next_number(KEYS[2], 'rules')
if rule == '' then
  redis.call('HDEL', KEYS[1], id)
else
  redis.call('HSET', KEYS[1], id, version .. ' ' .. now_ms() .. ' ' .. rule)
end
local outcome = rule == '' and 'LIFTED' or former and 'REPLACED' or 'SET'
redis.call('XADD', KEYS[3], 'MAXLEN', '~', '10000', '*', 'rules', version)
local line = {'outcome', string.lower(outcome), 'version', version, unpack(ARGV, 6)}
redis.call('XADD', KEYS[4], 'MAXLEN', '~', ARGV[4], '*', unpack(line))
return {outcome, version, former or ''}
