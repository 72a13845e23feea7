-- The outbox in SQLite 3.35 or later. `usher streamer --migrate` applies it, in one transaction.

CREATE TABLE usher_outbox_version (version INTEGER NOT NULL);
INSERT INTO usher_outbox_version (version) VALUES (1);

-- What an application writes in its own transaction. SQLite has one writer at a time, so ids are in the order of the commits.
CREATE TABLE staged_log_records (
    id         INTEGER PRIMARY KEY AUTOINCREMENT,
    uid        TEXT NOT NULL DEFAULT (lower(hex(randomblob(16)))),   -- the message's uid: the same for every repeat
    ticket_id  TEXT NOT NULL,                                        -- records of one ticket stay in order
    action     TEXT NOT NULL,                                        -- what happened: create, update ...
    object     TEXT NOT NULL,                                        -- to what: ride, invoice ...
    data       TEXT NOT NULL DEFAULT '{}',                           -- JSON
    created_at TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%fZ', 'now'))
);

-- A row that the streamers would refuse for its size (rows.py: ROW_BYTES) fails where it is written.
CREATE TRIGGER usher_outbox_row_size BEFORE INSERT ON staged_log_records
WHEN length(CAST(NEW.uid AS BLOB)) + length(CAST(NEW.ticket_id AS BLOB)) + length(CAST(NEW.action AS BLOB))
     + length(CAST(NEW.object AS BLOB)) + length(CAST(NEW.data AS BLOB)) > 1024 * 16384
BEGIN
    SELECT RAISE(ABORT, 'this row of the outbox is too large to become a message: more than 16384 KiB');
END;

-- Rows that can become no message, with the reason. They wait here for somebody; queries.sql says how to put one back. `halts`: the later
-- rows of its ticket wait in the outbox until it is put back or deleted (USHER_OUTBOX_REFUSED_POLICY=halt).
CREATE TABLE refused_log_records (
    id         INTEGER PRIMARY KEY,
    uid        TEXT,
    ticket_id  TEXT,
    action     TEXT,
    object     TEXT,
    data       TEXT,
    created_at TEXT,
    reason     TEXT NOT NULL,
    refused_at TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%fZ', 'now')),
    halts      BOOLEAN NOT NULL DEFAULT false
);
CREATE INDEX refused_log_records_halts ON refused_log_records (ticket_id) WHERE halts;

-- How far each log consumer is: the last entry whose effects are stored. `version` counts its commits, `records` what it handled.
CREATE TABLE checkpoints (
    name       TEXT NOT NULL,
    stream     TEXT NOT NULL,
    last_id    TEXT NOT NULL,
    version    INTEGER NOT NULL DEFAULT 0,
    records    INTEGER NOT NULL DEFAULT 0,
    updated_at TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%fZ', 'now')),
    PRIMARY KEY (name, stream)
);

-- What a log consumer remembers from one batch to the next, as JSON: a running total, for example.
CREATE TABLE consumer_states (
    name   TEXT NOT NULL,
    stream TEXT NOT NULL,
    state  TEXT NOT NULL,
    PRIMARY KEY (name, stream)
);

-- The uids of the last records of each log consumer, by which it knows a record that was sent twice.
CREATE TABLE consumer_uids (
    name   TEXT NOT NULL,
    stream TEXT NOT NULL,
    uid    TEXT NOT NULL,
    number INTEGER NOT NULL,                                         -- checkpoints.records when it was handled
    PRIMARY KEY (name, stream, uid)
) WITHOUT ROWID;
CREATE INDEX consumer_uids_number ON consumer_uids (name, stream, number);
