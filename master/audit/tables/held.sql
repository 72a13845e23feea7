SELECT stream, count(*) AS n, max(age_ms) AS age_ms, min(ms) AS ms FROM entries WHERE consumer IS NOT NULL GROUP BY stream
