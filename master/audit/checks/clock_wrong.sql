-- warn (proof): A consumer's clock is that of Redis, within half a second.
-- means: Fencing tokens and records say so. Executions are compared without it; handlers that ask get a wrong time.
-- repair: Set the clock of that host, or of Redis' (NTP).
SELECT stream, '' AS id, '' AS ticket, consumer AS owner,
       CASE WHEN above_us > below_us
            THEN concat('its clock was set while it ran: it was ahead of Redis'' by at most ', CAST(below_us / 1000000 AS DECIMAL(18, 3)),
                        ' s, and by at least ', CAST(above_us / 1000000 AS DECIMAL(18, 3)), ' s')
            ELSE concat('its clock is ahead of Redis'' by ', CAST(above_us / 1000000 AS DECIMAL(18, 3)), ' to ',
                        CAST(below_us / 1000000 AS DECIMAL(18, 3)), ' s') END AS detail
  FROM clocks WHERE is_wrong
