-- Everything that Usher asks of an outbox, each with its name. `:word` is a value; [dialect] means that only that database is asked so.
--
-- From any language, inside the transaction that changes your rows:
--
--     INSERT INTO staged_log_records (ticket_id, action, object, data) VALUES ('42', 'create', 'ride', '{"id": 7, "distance": 12.5}');
--
-- and nothing else: rolled back, it was never there; committed, it becomes a message. Give `uid` too if you have a name for the event.

-- name: version
-- The schema's version.
SELECT version FROM usher_outbox_version;

-- name: set_version
UPDATE usher_outbox_version SET version = :version;

-- name: write
-- What common.outbox.writer does for an application.
INSERT INTO staged_log_records (uid, ticket_id, action, object, data) VALUES (:uid, :ticket_id, :action, :object, :data);

-- name: batch [sqlite]
-- The first rows by id, up to :bytes of data (one more than fits, so that it is never none); data larger than :row_bytes is not fetched.
-- Ids of one ticket are in commit order, so what is visible of a ticket has no gap below it. Ids of other tickets may still be missing
-- below: they come later, which is why rows are removed by their own id and never by `id <= x`.
SELECT id, uid, ticket_id, action, object, CASE WHEN size <= :row_bytes THEN data END, size
FROM (SELECT id AS row_id, size, sum(size) OVER (ORDER BY id) - size AS before
      FROM (SELECT id, length(CAST(data AS BLOB)) AS size FROM staged_log_records ORDER BY id LIMIT :count))
JOIN staged_log_records ON id = row_id
WHERE before < :bytes ORDER BY id;

-- name: batch [postgresql]
SELECT id, uid, ticket_id, action, object, CASE WHEN size <= :row_bytes THEN data::text END, size
FROM (SELECT id AS row_id, size, sum(size) OVER (ORDER BY id) - size AS before
      FROM (SELECT id, octet_length(data::text) AS size FROM staged_log_records ORDER BY id LIMIT :count) AS first) AS summed
JOIN staged_log_records ON id = row_id
WHERE before < :bytes ORDER BY id;

-- name: remove [sqlite]
-- Exactly these, by primary key, after Redis has confirmed them.
DELETE FROM staged_log_records WHERE id = :id;

-- name: remove [postgresql]
DELETE FROM staged_log_records WHERE id = ANY(:ids);

-- name: set_aside
-- A row that can become no message is kept with the reason; `remove` follows in the same transaction.
INSERT INTO refused_log_records (id, uid, ticket_id, action, object, data, created_at, reason)
SELECT id, uid, ticket_id, action, object, data, created_at, :reason FROM staged_log_records WHERE id = :id;

-- name: put_back
-- By hand, after mending it: the row gets a new id, behind what its ticket has staged now. Delete it from refused_log_records then.
INSERT INTO staged_log_records (uid, ticket_id, action, object, data)
SELECT uid, ticket_id, action, object, data FROM refused_log_records WHERE id = :id;

-- name: waiting
-- What the streamer has not sent yet, and what it has refused.
SELECT (SELECT count(*) FROM staged_log_records), (SELECT count(*) FROM refused_log_records);

-- name: add_checkpoint
INSERT INTO checkpoints (name, stream, last_id) VALUES (:name, :stream, :last_id) ON CONFLICT (name, stream) DO NOTHING;

-- name: checkpoint
SELECT last_id, version, records FROM checkpoints WHERE name = :name AND stream = :stream;

-- name: hold
-- Locks the checkpoint until the transaction ends, in either dialect.
UPDATE checkpoints SET version = version WHERE name = :name AND stream = :stream;

-- name: advance
-- The first statement of a batch: only from the version that was read, so that of two processes with one name one goes on. It also locks.
UPDATE checkpoints SET last_id = :last_id, version = version + 1, records = records + :records, updated_at = CURRENT_TIMESTAMP
WHERE name = :name AND stream = :stream AND version = :version;

-- name: state
SELECT state FROM consumer_states WHERE name = :name AND stream = :stream;

-- name: store_state
INSERT INTO consumer_states (name, stream, state) VALUES (:name, :stream, :state)
ON CONFLICT (name, stream) DO UPDATE SET state = excluded.state;

-- name: remember [sqlite]
-- Remember these uids; returns those that were new. A list travels as JSON.
INSERT INTO consumer_uids (name, stream, uid, number) SELECT :name, :stream, value, :number FROM json_each(:uids) WHERE true
ON CONFLICT (name, stream, uid) DO NOTHING RETURNING uid;

-- name: remember [postgresql]
INSERT INTO consumer_uids (name, stream, uid, number) SELECT :name, :stream, uid, :number FROM unnest(CAST(:uids AS text[])) AS uid
ON CONFLICT (name, stream, uid) DO NOTHING RETURNING uid;

-- name: forget
-- Uids too far back for a repeat.
DELETE FROM consumer_uids WHERE name = :name AND stream = :stream AND number <= :number;
