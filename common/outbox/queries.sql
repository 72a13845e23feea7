-- Everything that Usher asks of an outbox, each with its name. `:word` is a value; [dialect]: asked so only there.
--
-- From any language, inside the transaction that changes your rows:
--
--     INSERT INTO staged_log_records (ticket_id, action, object, data) VALUES ('42', 'create', 'ride', '{"id": 7, "distance": 12.5}');
--
-- and nothing else: rolled back, it was never there; committed, it becomes a message. Give `uid` too if you have a name for the event.

-- name: write
-- What usher.common.outbox.store does for an application.
INSERT INTO staged_log_records (uid, ticket_id, action, object, data) VALUES (:uid, :ticket_id, :action, :object, :data);

-- name: batch [sqlite]
-- The first rows by id, up to :bytes (and the row that goes beyond, so that it is never none). Ids of one ticket are in commit order, so what
-- is visible of a ticket has no gap below it. Ids of other tickets may still be missing below: they come later, which is why rows are removed
-- by their own id and never by `id <= x`.
-- Rows of a ticket that a refused row halts wait: each look passes over them.
-- SQLite finds one row after the other: who reads stops at :bytes.
SELECT id, uid, ticket_id, action, object, data, 'off' AS read_only FROM staged_log_records AS staged
WHERE NOT EXISTS (SELECT 1 FROM refused_log_records AS refused WHERE refused.halts AND refused.ticket_id = staged.ticket_id)
ORDER BY id LIMIT :count;

-- name: batch [postgresql]
-- What is stored, perhaps compressed, is summed up first: measuring a value means to unpack it, and a thousand large ones take longer than
-- a lease. read_only: on a standby, or where default_transaction_read_only is set (a managed server's disk is nearly full).
-- No join: statistics of a queue are wrong as often as not (of a moment when it was empty), and then each row was looked for among all of
-- them. OFFSET 0 keeps NOT EXISTS from being made one, and sizes from being worked out anew where they are used; rows are read by id, up to
-- :count of them.
SELECT row_id, uid, ticket_id, action, object, data::text AS data, current_setting('transaction_read_only') AS read_only
FROM (SELECT *, sum(size) OVER (ORDER BY row_id) - size AS before
      FROM (SELECT *, octet_length(uid) + octet_length(ticket_id) + octet_length(action) + octet_length(object) + octet_length(data::text) AS size
            FROM (SELECT *, sum(stored) OVER (ORDER BY row_id) - stored AS stored_before
                  FROM (SELECT id AS row_id, uid, ticket_id, action, object, data,
                               pg_column_size(uid) + pg_column_size(ticket_id) + pg_column_size(action) + pg_column_size(object)
                               + pg_column_size(data) AS stored
                        FROM staged_log_records AS staged
                        WHERE NOT EXISTS (SELECT 1 FROM refused_log_records AS refused
                                          WHERE refused.halts AND refused.ticket_id = staged.ticket_id OFFSET 0)
                        ORDER BY id LIMIT :count) AS first) AS packed
            WHERE stored_before < :bytes OFFSET 0) AS unpacked) AS summed
WHERE before < :bytes ORDER BY row_id;

-- name: batch [mysql]
-- The size stands in the row: measuring a large value would mean to read it.
SELECT row_id, uid, ticket_id, action, object, data, if(@@global.read_only IN ('0', 'OFF'), 'off', 'on') AS read_only
FROM (SELECT id AS row_id, sum(size) OVER (ORDER BY id) - size AS size_before
      FROM (SELECT id, size FROM staged_log_records AS staged
            WHERE NOT EXISTS (SELECT 1 FROM refused_log_records AS refused WHERE refused.halts AND refused.ticket_id = staged.ticket_id)
            ORDER BY id LIMIT :count) AS chosen) AS summed
LEFT JOIN staged_log_records AS staged ON staged.id = row_id
WHERE size_before < :bytes ORDER BY row_id;

-- name: remove [sqlite]
-- Exactly these, by primary key, after Redis has confirmed them.
DELETE FROM staged_log_records WHERE id = :id;

-- name: remove [postgresql]
-- Only the rows that were read: a standby that is promoted without the last commits gives out their ids again. NULL: whatever its uid is.
DELETE FROM staged_log_records AS staged USING unnest(CAST(:ids AS bigint[]), CAST(:uids AS text[])) AS sent (id, uid)
WHERE staged.id = sent.id AND staged.uid = coalesce(sent.uid, staged.uid)
-- Else a planner that believes the outbox to be empty looks at all of it.
AND staged.id BETWEEN (SELECT min(id) FROM unnest(CAST(:ids AS bigint[])) AS id) AND (SELECT max(id) FROM unnest(CAST(:ids AS bigint[])) AS id)
-- A row that somebody holds is not waited for: each new connection would hang there as well, until the server has no more of them.
AND (SELECT set_config('lock_timeout', '500ms', true)) IS NOT NULL;

-- name: remove [mysql]
-- As in PostgreSQL; how long a row that somebody holds is waited for is a setting of the session. Uids are hexadecimal, for JSON_TABLE has
-- the character set of the database. By primary key: of a small table MySQL would look at each row, and wait for what others are writing.
DELETE staged FROM JSON_TABLE(:sent, '$[*]' COLUMNS (id BIGINT PATH '$[0]', uid LONGTEXT PATH '$[1]')) AS sent
STRAIGHT_JOIN staged_log_records AS staged FORCE INDEX (PRIMARY)
    ON staged.id = sent.id AND staged.uid = coalesce(unhex(sent.uid), staged.uid);

-- name: set_aside
-- A row that can become no message is kept with the reason; `remove` follows in the same transaction. :halts: its ticket waits for it.
INSERT INTO refused_log_records (id, uid, ticket_id, action, object, data, created_at, reason, halts)
SELECT id, uid, ticket_id, action, object, data, created_at, :reason, :halts FROM staged_log_records WHERE id = :id
ON CONFLICT (id) DO UPDATE SET reason = excluded.reason, halts = excluded.halts;

-- name: set_aside [mysql]
INSERT INTO refused_log_records (id, uid, ticket_id, action, object, data, created_at, reason, halts)
SELECT id, uid, ticket_id, action, object, data, created_at, :reason, :halts FROM staged_log_records WHERE id = :id
ON DUPLICATE KEY UPDATE reason = :reason, halts = :halts;

-- name: put_back
-- By hand, after mending it: the row gets a new id, behind what its ticket has staged now. Delete it from refused_log_records then.
INSERT INTO staged_log_records (uid, ticket_id, action, object, data)
SELECT uid, ticket_id, action, object, data FROM refused_log_records WHERE id = :id;

-- name: put_back_first [sqlite, mysql]
-- By hand, after mending a row that halts its ticket: under its own id, so before all that waits behind it. Delete it from
-- refused_log_records in the same transaction: that lets the ticket go on, and so it does without the row if only this is done.
INSERT INTO staged_log_records (id, uid, ticket_id, action, object, data)
SELECT id, uid, ticket_id, action, object, data FROM refused_log_records WHERE id = :id;

-- name: put_back_first [postgresql]
INSERT INTO staged_log_records (id, uid, ticket_id, action, object, data)
SELECT id, uid, ticket_id, action, object, data FROM refused_log_records
WHERE id = :id AND set_config('usher.outbox_lock', 'off', true) = 'off';

-- name: waiting
-- What the streamer has not sent yet, and what it has refused.
SELECT (SELECT count(*) FROM staged_log_records), (SELECT count(*) FROM refused_log_records);

-- name: halted
-- How many tickets wait for a refused row.
SELECT count(DISTINCT ticket_id) FROM refused_log_records WHERE halts;

-- name: of_ticket
-- A ticket's rows in the outbox: how many are staged, the first of them and since when, and the refused ones.
SELECT count(*), min(id), min(created_at) FROM staged_log_records WHERE ticket_id = :ticket_id;

-- name: refused_of_ticket
SELECT id, reason, refused_at, halts FROM refused_log_records WHERE ticket_id = :ticket_id ORDER BY id LIMIT :count;

-- name: add_checkpoint
INSERT INTO checkpoints (name, stream, last_id) VALUES (:name, :stream, :last_id) ON CONFLICT (name, stream) DO NOTHING;

-- name: add_checkpoint [mysql]
INSERT INTO checkpoints (name, stream, last_id) VALUES (:name, :stream, :last_id) ON DUPLICATE KEY UPDATE last_id = last_id;

-- name: checkpoint
SELECT last_id, version, records FROM checkpoints WHERE name = :name AND stream = :stream;

-- name: checkpoint_and_state
-- Both of one commit: two statements under READ COMMITTED would be two moments.
SELECT c.last_id, s.state FROM checkpoints c LEFT JOIN consumer_states s ON s.name = c.name AND s.stream = c.stream
WHERE c.name = :name AND c.stream = :stream;

-- name: states
SELECT c.name, c.last_id, s.state FROM checkpoints c LEFT JOIN consumer_states s ON s.name = c.name AND s.stream = c.stream
WHERE c.stream = :stream ORDER BY c.name;

-- name: hold
-- Locks the checkpoint until the transaction ends, in either dialect.
UPDATE checkpoints SET version = version WHERE name = :name AND stream = :stream;

-- name: advance
-- The first statement of a batch: only from the checkpoint that was read, so that of two processes with one name one goes on, and none
-- goes on from where somebody's UPDATE has moved it away. It also locks.
UPDATE checkpoints SET last_id = :last_id, version = version + 1, records = records + :records, updated_at = CURRENT_TIMESTAMP
WHERE name = :name AND stream = :stream AND version = :version AND last_id = :from_id;

-- name: state
SELECT state FROM consumer_states WHERE name = :name AND stream = :stream;

-- name: store_state
INSERT INTO consumer_states (name, stream, state) VALUES (:name, :stream, :state)
ON CONFLICT (name, stream) DO UPDATE SET state = excluded.state;

-- name: store_state [mysql]
INSERT INTO consumer_states (name, stream, state) VALUES (:name, :stream, :state) ON DUPLICATE KEY UPDATE state = :state;

-- name: known
-- Which of these uids are remembered. The checkpoint's lock keeps others away meanwhile.
SELECT uid FROM consumer_uids WHERE name = :name AND stream = :stream AND uid IN :uids;

-- name: remember
INSERT INTO consumer_uids (name, stream, uid, number) VALUES (:name, :stream, :uid, :number);

-- name: recall
-- It came again: what is too far back is counted from here.
UPDATE consumer_uids SET number = :number WHERE name = :name AND stream = :stream AND uid = :uid;

-- name: forget
-- Uids too far back for a repeat.
DELETE FROM consumer_uids WHERE name = :name AND stream = :stream AND number <= :number;
