-- bad (again): The ids in a record are in order, each once.
-- means: Its owner runs them in the order of the record, which is not that of the stream.
-- repair: Did others write to the index? Delete the field (HDEL {prefix}tickets {ticket}): the leader indexes it anew.
SELECT stream, min(id) AS id, ticket, min(owner) AS owner, 'its ids are not in order, each once' AS detail
  FROM tickets WHERE contains(owner, ':') AND NOT in_order GROUP BY stream, ticket
