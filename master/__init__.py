"""The master: reads a ticket stream and delegates each entry to a registered consumer by ticket affinity.

Threads and what they own
-------------------------
::

    elect     leader/elector.py             the leader lease: takes and extends it; takes a new epoch when the
                                            dispatcher is in doubt
    dispatch  dispatch/dispatcher.py        the only owner of the board (policy/board/): takes over, reads, plans, hands
                                            over, recovers; between its turns it waits on the stream notifier
                                            (stream_notifier.py), which Redis notifies of new entries and other threads
                                            set; the stream cursor (stream_cursor.py) decides when it peeks at new
                                            entries (leader/entries.py)
    roster    membership/registry.py        reads registrations and leases
    health    membership/health_checker.py  asks every consumer's health URL
    reap      recovery/repairs.py           forgets dead incarnations
    delayed   operations/delayed_sender.py  adds delayed messages to the stream when they are due
    changes   dispatch/events.py            learns of tickets and rules that others have changed, and of new consumers
    trim      operations/trimming.py        cuts old entries that no reader needs
    gather    sources/gatherer.py           with several ticket streams: moves their new entries to the work stream
    watch     sources/discovery.py          helps ``gather``: learns which sources have changed
    discover  sources/discovery.py          helps ``gather``: finds sources that match a pattern
    share     sources/services.py           helps ``gather``: shares the sources among the masters
    trim-sources  sources/trimmer.py        cuts gathered entries that no reader needs (off by default)
    pulse     insight/live_overview.py      looks at the whole system for the page, once for all who look
    feed      insight/ticket_feed.py        tells followers what happens to their tickets
                                            (over common/http/push.py)
    bulk      operations/bulk_letters.py    redrives or drops all dead letters of a filter, as asked for on the page
    (web)     web/                          gunicorn's threads: registrations, look-ups, reports of what consumers have
                                            acknowledged in Redis

Only ``dispatch`` touches the board; the others post events to it (dispatch/events.py). The work of its turns is in
files without a thread: stream_cursor.py in dispatch/, takeover.py and repairs.py in recovery/, and leader/entries.py,
which checks entries that were read; leader/leader_scripts.py calls the scripts. Every thread has a connection of its
own. Every step that changes anything carries the epoch, so a thread that acts on old knowledge is refused by Redis, not
by hope.

Several ticket streams
----------------------
A lead, an index and inboxes for each of a thousand streams would cost a thousand times as much, and split the
consumers' slots. So the entries of all of them are gathered into one work stream (sources/), and one leader delegates
from that. Every master gathers its share, also a standby; gathering needs no lead, because each step is one script that
adds the entries and moves the source's group past them: done twice, or by two at a time, it moves nothing twice.
Fairness is in the turns (policy/fair_queue.py), and in that the work stream takes no more than the leader reads next: a
flood waits in its own stream. A ticket belongs to its source, and handlers see the producer's own ids.

One epoch
---------
::

    elected -> take over: living owners' tickets from the index, dead incarnations taken back, all of `master` read in
               id order
            -> peek at new entries, plan, hand over, free what is reported ...
            -> a reply that is not sure: new epoch, memory dropped, take over again
            -> FENCED: another master leads; memory dropped, standby

What goes wrong, and what then
------------------------------
==================================  ===================================================================================
a consumer's lease ends             its entries go to ``master`` page by page, then to others, oldest first, with a new
                                    fence
a consumer's health URL is silent   it gets no new tickets; its lease is revoked if it does not renew it either
the leader dies                     a standby is elected when the leader lease ends, and takes over
the leader is paused                its first call after waking is answered FENCED
a reply of Redis is lost            a new epoch refuses the late command; everything is read again
a report over HTTP is lost          the reconciler reads the records of quiet tickets, and frees them
a master that gathers dies          the others gather its part when its note in the shares ends (the leader lease)
a source's group is destroyed       it is made again exactly where it was (the hash ``gathered``); nothing is lost or
                                    repeated
a source is deleted                 it is forgotten; when it comes back, it is taken in from its beginning
a source's reader is lost           nothing is cut off that source (not_trimmed); it is gathered, and the others are cut
a source cannot be taken in         it has a trouble (not_a_stream, ahead, before, refused) in log, status and doctor;
                                    the others go on
a gathered ticket stays halted      what is done above it stays in the work stream; from 100,000 entries on that is a
                                    trouble (held_back)
Redis' memory is full               nothing is gathered; the sources keep it
==================================  ===================================================================================
"""
