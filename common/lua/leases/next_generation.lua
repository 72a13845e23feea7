-- next_generation: a number for a new incarnation of a consumer.
-- KEYS: 1 counters
-- ARGV: none
-- Returns: the generation
-- Why Lua: read, compare with the clock and write are one step. A step of its own, because register must know the name
--          of the new lease key before it runs: every key a script touches is in KEYS.
return next_number(KEYS[1], 'generation')
