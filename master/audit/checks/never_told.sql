-- bad (again): What an incarnation owns was handed over in its inbox, as far back as that goes.
-- means: It owns the entry and never heard of it: it does not run it, and later entries of the ticket wait.
-- repair: Restart that consumer: its tickets are handed over anew. Did another program write to index or inbox?
WITH held AS (SELECT t.* FROM entries e JOIN untold t ON t.nth = e.nth AND t.stream = e.stream AND t.id = e.id AND t.owner = e.consumer)
SELECT t.stream, t.id, t.ticket, t.owner, concat('handed over under fencing token ', t.fence) AS detail
  FROM held t ANTI JOIN inboxes b ON b.stream = t.stream AND b.owner = t.owner AND b.id = t.id WHERE t.is_new
UNION ALL
SELECT t.stream, t.id, t.ticket, t.owner,
       concat('handed over under fencing token ', t.fence, ' and never begun; its owner has run what it was given later')
  FROM (SELECT stream, ticket, owner, fence, min_by(id, nth) AS id FROM held WHERE NOT is_new GROUP BY stream, ticket, owner, fence) t
  ANTI JOIN ids r ON r.stream = t.stream AND r.id = t.id ANTI JOIN inboxes b ON b.stream = t.stream AND b.owner = t.owner AND b.id = t.id
