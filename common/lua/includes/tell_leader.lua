-- Tell the leader that another program has changed a ticket's record in a way that lets the ticket move, or stops it:
-- the leader watches this stream, hands nothing over by a plan that does not know of the note, and reads the record
-- again. The stream is capped: a leader that finds as many notes as that reads everything anew.
local function tell_leader(changed_key, ticket)
  redis.call('XADD', changed_key, 'MAXLEN', '~', '10000', '*', 'ticket', ticket)
end

-- Tell it something that it sees a little later without being told.
local function tell(changed_key, what, whom)
  redis.pcall('XADD', changed_key, 'MAXLEN', '~', '10000', '*', what, whom)
end
