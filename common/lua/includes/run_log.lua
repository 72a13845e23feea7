-- Add a record to the run log, which keeps about `length` of them. One above 8 KiB, of about a hundred executions,
-- counts as several: so the log has no more than `length` * 8 KiB, whatever the size of the batches.
local function note_run(runs_key, length, record)
  local most = math.max(1, math.floor(tonumber(length) * 8192 / math.max(8192, #record)))
  redis.call('XADD', runs_key, 'MAXLEN', '~', string.format('%.0f', most), '*', 'batch', record)
end
