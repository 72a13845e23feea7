-- warn (again), Stuck ticket: An entry is delivered a few times at most.
-- means: It has changed hands again and again: its handler may kill its consumers.
-- repair: Look at the message; `usher dead` lists those that were given up.
SELECT e.stream, e.id, e.ticket, e.consumer AS owner, e.detail FROM marked e CROSS JOIN limits l WHERE e.deliveries > l.deliveries
