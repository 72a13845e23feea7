-- Messages by what they are known by: one that is added again has its uid, a gathered one its place in its source. `uid`:
-- as a sink stores it.
SELECT stream, id, nth, coalesce(fields['usher_from'], nullif(fields['uid'], ''), id) AS known_by,
       CASE WHEN {gathered}
            THEN concat(regexp_replace(fields['usher_from'], '^[^ ]* [^ ]* ', ''), '/',
                        coalesce(nullif(fields['uid'], ''), split_part(fields['usher_from'], ' ', 1)))
            ELSE coalesce(nullif(fields['uid'], ''), id) END AS uid
  FROM messages
