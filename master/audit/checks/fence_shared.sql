-- bad (proof): A fencing token of a ticket is given to one incarnation.
-- means: Two incarnations ran the ticket under one fencing token: a sink cannot tell them apart.
-- repair: Was Redis restored from a copy? Then this is its trace. If not, please report it.
SELECT stream, id, ticket, consumer AS owner,
       concat(ran, '; ', consumer_before, ' ran ', id_before, ' under it before, from ', at_utc(start_before), ' on') AS detail
  FROM (SELECT *, lag(fence) OVER turn AS fence_before, lag(consumer) OVER turn AS consumer_before, lag(id) OVER turn AS id_before,
               lag(start_us) OVER turn AS start_before
          FROM suspects
        WINDOW turn AS (PARTITION BY stream, ticket ORDER BY fence, start_us, ended_us, nth, rec)) s
 WHERE fence = fence_before AND consumer <> consumer_before
