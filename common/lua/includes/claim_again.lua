-- Claim for `name` an entry that nobody has pending, although neither an acknowledgement nor a letter of ours ended it
-- (XACK, XGROUP DELCONSUMER by hand). Returns true when it is pending again; false when its body is gone, or when the
-- group is still to be given it. XCLAIM asks for the body itself, and does not copy it. Needs util and group, included
-- before this file.
local function claim_again(stream, group, name, id)
  return not is_above(id, group_facts(stream, group)['last-delivered-id'])
    and #redis.call('XCLAIM', stream, group, name, '0', id, 'FORCE', 'JUSTID') == 1
end
