-- Tell the leader that another program has changed a ticket's record in a way that lets the ticket move, or stops it:
-- the leader reads the record again. The stream is capped: a note that a leader never read is from before its epoch, or
-- is found when the leader compares memory with the index.
local function tell_leader(changed_key, ticket)
  redis.call('XADD', changed_key, 'MAXLEN', '~', '10000', '*', 'ticket', ticket)
end
