-- bad: runs entry
-- rule: A message that is done has its effect in the sink (checked where USHER_AUDIT_SINK_URL names its database).
-- means: The handler returned, and the sink knows nothing of it: no effect is there, or it was stored without the sink.
-- repair: Do all handlers of the stream use the sink? Was its database restored from a copy? Then send it again: usher send.
SELECT d.stream, d.id, d.ticket, '' AS owner,
       concat('done, as was noted at ', at_utc(d.noted_ms * 1000), ' (UTC); the sink has no effect of its uid ', e.uid) AS detail
  FROM (SELECT stream, id, ticket, min(record_ms) AS noted_ms FROM runs WHERE outcome = 'done' GROUP BY stream, id, ticket) d
  JOIN sent e ON e.stream = d.stream AND e.id = d.id JOIN sink s ON d.noted_ms > s.floor_ms
  ANTI JOIN effects x ON x.key_ticket = sink_key(d.ticket) AND x.key_uid = sink_key(e.uid)
 WHERE NOT contains(concat(d.ticket, e.uid), '�')
