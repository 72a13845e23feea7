-- What `usher streamer --migrate` makes where USHER_OUTBOX_FROM names a table of your own: each row that is inserted there is staged, in
-- the same transaction. $names stand for the table's, from the settings. What cannot become a message is staged as it is, without a uid:
-- streamers refuse it, and say why. MySQL's triggers run with the rights of who made them, and cannot delete from their own table.

-- name: trigger
CREATE TRIGGER $trigger AFTER INSERT ON $table FOR EACH ROW
$staged

-- name: staged
INSERT INTO staged_log_records (uid, ticket_id, action, object, data)
SELECT CASE WHEN why = '' THEN uid ELSE '' END, coalesce(ticket_id, ''),
       CASE WHEN why = '' THEN action ELSE concat('unreadable: ', why) END, CASE WHEN why = '' THEN object ELSE '$table_name' END,
       CASE WHEN why = '' THEN coalesce(data, 'null')
            ELSE json_object('$uid_name', uid, '$ticket_id_name', ticket_id, '$action_name', action, '$object_name', object, '$data_name', data) END
FROM (SELECT CAST($row.$uid AS CHAR) AS uid, CAST($row.$ticket_id AS CHAR) AS ticket_id, CAST($row.$action AS CHAR) AS action,
             CAST($row.$object AS CHAR) AS object, CAST($row.$data AS CHAR) AS data,
             CASE WHEN $row.$uid IS NULL THEN '$uid_name is NULL' WHEN $row.$ticket_id IS NULL THEN '$ticket_id_name is NULL'
                  WHEN $row.$action IS NULL THEN '$action_name is NULL' WHEN $row.$object IS NULL THEN '$object_name is NULL'
                  WHEN NOT json_valid(coalesce($row.$data, 'null')) THEN '$data_name is no JSON' ELSE '' END AS why $rest) AS staged $order
