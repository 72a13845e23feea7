-- What `usher streamer --migrate` makes where USHER_OUTBOX_FROM names a table of your own: each row that is inserted there is staged, in
-- the same transaction. $names stand for the table's, from the settings. SECURITY DEFINER: who may insert there needs no further right.

-- name: trigger
CREATE OR REPLACE FUNCTION usher_outbox_take_row(r $table) RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = $schema, pg_temp AS $$$$
DECLARE
    why  text := CASE WHEN r.$uid IS NULL THEN '$uid_name is NULL' WHEN r.$ticket_id IS NULL THEN '$ticket_id_name is NULL'
                      WHEN r.$action IS NULL THEN '$action_name is NULL' WHEN r.$object IS NULL THEN '$object_name is NULL' END;
    body json;
BEGIN
    BEGIN
        body := coalesce(CAST(r.$data AS text), 'null');
    EXCEPTION WHEN invalid_text_representation OR untranslatable_character THEN
        why := coalesce(why, '$data_name is no JSON');
    END;
    -- What cannot become a message is staged as it is, without a uid: streamers refuse it, and say why.
    INSERT INTO staged_log_records (uid, ticket_id, action, object, data)
    SELECT CASE WHEN why IS NULL THEN CAST(r.$uid AS text) ELSE '' END, coalesce(CAST(r.$ticket_id AS text), ''),
           coalesce('unreadable: ' || why, CAST(r.$action AS text)), CASE WHEN why IS NULL THEN CAST(r.$object AS text) ELSE '$table_name' END,
           CASE WHEN why IS NULL THEN body ELSE row_to_json(r) END;
    $remove
END $$$$;
REVOKE EXECUTE ON FUNCTION usher_outbox_take_row($table) FROM PUBLIC;

CREATE OR REPLACE FUNCTION usher_outbox_take() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = $schema, pg_temp AS $$$$
BEGIN
    PERFORM usher_outbox_take_row(NEW);
    RETURN NULL;
END $$$$;
CREATE TRIGGER $trigger AFTER INSERT ON $table FOR EACH ROW EXECUTE FUNCTION usher_outbox_take();

-- name: take_all
DO $$$$
DECLARE
    r $table;
BEGIN
    FOR r IN SELECT * FROM $table $order LOOP
        PERFORM usher_outbox_take_row(r);
    END LOOP;
END $$$$;

-- name: staged
