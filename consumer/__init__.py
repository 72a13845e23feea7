"""The consumer: it runs a handler on what is handed over to it, every ticket's messages in order, one at a time.

Threads and what they own
-------------------------
::

    register  lifecycle/registrar.py     takes the consumer's name at a master, over HTTP, then ends; before that,
                                         reports what the predecessor was running when it ended (process_ending.py)
    read      execution/inbox_reader.py  inbox -> bodies of exactly those ids -> lanes
    work-N    execution/async_pool.py    runs lanes: short handlers one after another on one thread, others side by side
    async     execution/async_pool.py    the same for ``async def`` handlers, on one event loop
    (both)    execution/batch_pool.py    the same for batch handlers: one call with messages of several lanes
    suspects-N  isolation/worker.py      runs messages that may have ended a process, in a child process each
    ack       execution/acker.py         finished messages -> one ack script per batch; failures -> one charge script
                                         per batch; dead letters; tickets that go back: recalled, or put off
    report    execution/reporter.py      tells the leader over HTTP what Redis has accepted
    beat      lifecycle/heartbeat.py     renews the lease, in step with real progress
    guard     lifecycle/heartbeat.py     ends the process when the lease can have ended
    watch     execution/watchdog.py      ends the process when a handler ran past its deadline (only with
                                         USHER_HANDLER_SECONDS)
    (web)     web.py                     health endpoint, gunicorn's threads

The lanes are shared (execution/lanes.py, one lock); everything else belongs to its thread, which has a connection.

What an incarnation believes, and why it may
--------------------------------------------
The inbox is the authority on what to run, in which order, under which fence. The pending list has the bodies, unless
they came along with the inbox, and it alone knows whether a message that this process has had before is still to be
run. A handler starts only while the lease cannot have ended anywhere: its local end is counted from *before* the
renewal was sent, on a clock that counts suspend. A lost lease is never taken up again: the process leaves, and its
successor is a new incarnation.

Which attempts are counted, and to whom they are charged
--------------------------------------------------------
A start is recorded before a crash can happen by a write into the journal (lifecycle/journal.py): a few bytes of a
mapped file, just before the handler is called. A failure is written to Redis with the acker's next batch. When a
process ends without knowing why, its successor on the same machine tells Redis what was running, before it takes the
name: all of it is suspect, and none is charged, since each may have returned a moment before. The same holds for a
message that the watchdog blames. A suspect runs in a child process (isolation/worker.py): whether that returns, raises,
dies or is killed at the deadline is seen by its consumer, so it is charged exactly, with the ends before it. A message
whose handler returns or raises is no longer a suspect. So the killer is given up after max_attempts starts (or one
more, if the first end took its last attempt), and its neighbours keep their count (policy/quarantine.py). Without a
journal the leader notes losses (docs/handlers.md).

====================================  ================================================================================
a process or Redis ends when          what becomes of the message
====================================  ================================================================================
before the start is in the journal    it never started, and is charged with nothing
it runs in the consumer               the successor makes it a suspect; charged with nothing
it returned, not acknowledged         no longer in the journal: it runs again, as if it had never run
the acknowledgement's reply is lost   the same batch goes again: GONE; if the consumer ends too, Redis has it as done
it runs in a child, the child ends    charged, if the child had run no other; tried again in a new child
it runs in a child, or returned, and  the child ends too; charged with nothing (in doubt, if memory may have ended both)
the consumer ends before it hears it
====================================  ================================================================================

What goes wrong, and what then
------------------------------
==============================  ======================================================================================
Redis cannot be reached         running handlers finish, no new ones start once the lease may have ended; then the
                                process leaves
a master cannot be reached      only speed is lost: reports go to the next master
the handler raises              the message is tried again in place, with backoff; its ticket waits, its slot does not.
                                For a long wait the ticket is given back, with the time at which it is due
the leader recalls a ticket     it is given back if nothing of it was started; else nothing is said
a reply to a give-back is lost  the same again: GIVEN, or GONE. Its fence is closed since before the first call, so that
                                nothing of the ticket under it starts here, and what comes under a later one does
the body of a message is gone   dead letter ``body_gone``, in its place in the order
SIGTERM                         drain: no new starts, running handlers finish, acknowledgements are flushed, the rest
                                is given back
==============================  ======================================================================================
"""
