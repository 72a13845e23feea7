-- What `usher streamer --migrate` makes where USHER_OUTBOX_FROM names a table of your own: each row that is inserted there is staged, in
-- the same transaction. $names stand for the table's, from the settings. What cannot become a message is staged as it is, without a uid:
-- streamers refuse it, and say why.

-- name: trigger
CREATE TRIGGER $trigger AFTER INSERT ON $table BEGIN
    $staged;
    $remove
END

-- name: staged
INSERT INTO staged_log_records (uid, ticket_id, action, object, data)
SELECT CASE WHEN why = '' THEN CAST(uid AS TEXT) ELSE '' END, coalesce(CAST(ticket_id AS TEXT), ''),
       CASE WHEN why = '' THEN CAST(action AS TEXT) ELSE 'unreadable: ' || why END, CASE WHEN why = '' THEN CAST(object AS TEXT) ELSE '$table_name' END,
       CASE WHEN why = '' THEN coalesce(CAST(data AS TEXT), 'null')
            ELSE json_object('$uid_name', quote(uid), '$ticket_id_name', quote(ticket_id), '$action_name', quote(action),
                             '$object_name', quote(object), '$data_name', quote(data)) END
FROM (SELECT $row.$uid AS uid, $row.$ticket_id AS ticket_id, $row.$action AS action, $row.$object AS object, $row.$data AS data,
             CASE WHEN $row.$uid IS NULL THEN '$uid_name is NULL' WHEN $row.$ticket_id IS NULL THEN '$ticket_id_name is NULL'
                  WHEN $row.$action IS NULL THEN '$action_name is NULL' WHEN $row.$object IS NULL THEN '$object_name is NULL'
                  WHEN NOT json_valid(coalesce($row.$data, 'null')) THEN '$data_name is no JSON' ELSE '' END AS why $rest) $order

-- name: take_all
$staged;
