-- bad (again): A pending entry is in the stream.
-- means: The entry was trimmed or deleted before it was handled (also by MAXLEN of an XADD): its content is lost.
-- repair: Trim with `usher trim` only, which never cuts what is pending. The leader writes a dead letter (body_gone).
SELECT stream, id, ticket, consumer AS owner, detail FROM marked WHERE NOT in_stream
