-- bad (again, proof): Every entry that the group has read is pending, acknowledged by an execution in the run log, or a dead letter.
-- means: It was read, is not pending, and no record says that it was handled: acked by hand, or its consumer deleted.
-- repair: Send it again if its effect is missing: usher send. Who runs XACK or XGROUP DELCONSUMER (redis-cli MONITOR)?
SELECT o.stream, o.id, o.own AS ticket, '' AS owner, 'not pending, and in no record' AS detail
  FROM odd o ANTI JOIN again a ON a.stream = o.stream AND a.id = o.id
 WHERE o.kind = 'lost' AND o.ms > o.known_ms AND o.ms > o.drop_ms AND o.ms > o.damaged_ms
