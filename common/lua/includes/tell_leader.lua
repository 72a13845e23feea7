-- Somebody else than the leader has changed a ticket's record in a way that lets it move, or stops it: the leader reads the record again.
-- The stream is capped: what a leader never read is of a time before its epoch, or is found when it compares memory with the index.
local function tell_leader(changed_key, ticket)
  redis.call('XADD', changed_key, 'MAXLEN', '~', '10000', '*', 'ticket', ticket)
end
