-- bad: No entry leaves the stream before the group has read it (counted by Redis 7 or later).
-- means: Messages were cut before anybody read them (MAXLEN, MINID, XTRIM, XDEL): never handled, and without a dead letter.
-- repair: Have them sent again; take the option out of the producer, and trim with `usher trim` only.
SELECT stream, '' AS id, '' AS ticket, '' AS owner, concat(cut_unread, ' entries', cut_told) AS detail FROM facts WHERE cut_unread > 0
