-- The outbox in SQLite 3.35 or later. Blocks are versions; `usher streamer --migrate` applies those that are missing, in one transaction.
-- A block that was released is never changed: what comes later is a block of its own.

-- version: 1

CREATE TABLE usher_outbox_version (version INTEGER NOT NULL);
INSERT INTO usher_outbox_version (version) VALUES (0);

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

-- Rows that can become no message, with the reason. They wait here for somebody; queries.sql says how to put one back.
CREATE TABLE refused_log_records (
    id         INTEGER PRIMARY KEY,
    uid        TEXT,
    ticket_id  TEXT,
    action     TEXT,
    object     TEXT,
    data       TEXT,
    created_at TEXT,
    reason     TEXT NOT NULL,
    refused_at TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%fZ', 'now'))
);

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
