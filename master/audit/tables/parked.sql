SELECT e.* FROM entries e CROSS JOIN limits l WHERE e.consumer = 'master' AND e.idle_ms > l.parked_ms AND e.in_stream
