-- bad (again): A record of the index reads `owner fence id id ...`.
-- means: Another program wrote to the index; the ticket cannot be handed over or acknowledged.
-- repair: Delete the field (HDEL {prefix}tickets {ticket}): the pending list is the truth, the leader indexes it anew.
SELECT stream, '' AS id, ticket, '' AS owner, '' AS detail FROM tickets WHERE id IS NULL
