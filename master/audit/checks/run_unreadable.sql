-- bad (proof): A record of the run log is one object of columns (common/protocol/run_log.py).
-- means: Another program wrote to the run log: what it replaced cannot be proven.
-- repair: Find the program that writes to {runs}; XDEL the record.
SELECT stream, record AS id, '' AS ticket, '' AS owner, 'the record cannot be read' AS detail FROM runs WHERE id IS NULL
