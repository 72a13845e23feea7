"""Hold what the master and the consumer share: names, keys, reply shapes, atomic steps.

``common`` is imported by the master and by the consumer and imports neither.

Glossary: the only words for these things in names, logs, keys and pages
------------------------------------------------------------------------
message       what a producer sent: uid, ticket_id and fields
entry         a message in a stream, with its stream id
ticket        all messages with one ticket_id; the unit of order and of recovery. Also called message group or
              ordering key
delayed       a message that is added to its stream when it is *due*; until then it has no place in any order
ticket stream the Redis stream that producers add messages to
group         the consumer group of a ticket stream
source        one of several ticket streams that are taken in
gather        move new entries from the sources to the work stream
work stream   the ticket stream that gathering fills, and the only one that everything behind it sees; the sources
              are spread over the masters in *shards*
pending list  (PEL) Redis' list of entries that were read and not acknowledged
master        the program that delegates; the *leader* is the master that holds the lease, the others are standbys
consumer      the program that runs handlers
incarnation   one start of a consumer; ``name:generation`` is its name in the group
lease         a key with a time to live: its holder counts as alive
hand over     master -> consumer: the entries change owner in the pending list
owner         the incarnation that may run a ticket now
index         the hash with a *record* for each ticket that is in processing, given back or halted: owner, fence, ids
board         what the leader has in memory of tickets and consumers, from which it plans; a consumer's *lane board*
              is all of its lanes
step          a script that carries an epoch or a lease; ``steps`` are all of one leader (LeaderScripts) or of one
              incarnation (OwnerScripts)
fence         the fencing token: a number that grows each time a ticket gets an owner; a sink refuses a lower one
inbox         the log of hand-overs to one incarnation; it also wakes the incarnation
notifier      tells the leader that a stream has new entries
cursor        how far the leader has read a stream
lane          a consumer's queue for one ticket
parked        on the leader's board and with no consumer: pending under ``master``, or only peeked at yet; people read
              *waiting*
tenant        whose a message is; tenants take turns. Its tenant and its priority are a message's *marks*
halted        a ticket whose given-up message, pending under ``halted``, waits for an operator
take back     dead incarnation -> ``master``; after a change of leader the *takeover* rebuilds the leader's state
give back     living incarnation -> ``master``, at a drain, or while it goes on: a ticket that is *recalled* (the leader
              wants it for another consumer), or *put off* (its first message waits for a time that stands in Redis)
attempt       one *start* of a handler
dead letter   an entry given up, kept with its reason
redrive       put a dead letter back
rehearsal     a dry run: one call of a handler with an existing message, without effects: sinks roll back, and Redis
              is only read
drain         stop taking work, finish what runs, give back the rest
rule          an operator's order for a ticket, a pattern, a tenant or everything: pause or slow; for a consumer:
              pause, which is a drain by an operator, and the consumer is then *paused*
action        an operator's deed, with who, what and why; all of them are in the *action log*
explain       say what a ticket waits for, and until when
lag           the entries not yet read, in the sources too; *unfinished* adds the pending ones
stats         the sums for /metrics and autoscalers
live overview the data of the operator's page, collected once for all its viewers
registry      the consumers that are registered, and whether they are alive
run log       start and end of every execution
audit         the job that proves from pending lists and run log that the promise held
outbox, streamer, checkpoint, reconciler    see ``usher.common.outbox``
stream router, subscription                 see ``usher.common.router.router``
follower      a client that follows a ticket live; the master's *feed* serves all of them
"""
