"""The master: reads a ticket stream and delegates each entry to a registered consumer by ticket affinity.

Threads and what they own
-------------------------
::

    elect     elector.py         the leader lease: takes it, extends it, takes a new epoch when the dispatcher is in doubt
    doorbell  intake.py          waits in Redis for new entries (consumes nothing) and rings the dispatcher
    dispatch  dispatcher.py      the only owner of the board (policy/dispatch.py): adopts, reads, plans, hands over, recovers
    roster    roster.py          looks at registrations and leases
    health    health_checker.py  asks every consumer's health URL
    reap      janitor.py         forgets dead incarnations
    trim      trimming.py        cuts what no reader needs (off by default)
    (web)     web/               gunicorn's threads: register, acknowledge, look-ups

Nobody but ``dispatch`` touches the board; the others put what they found into its mailbox. Every thread has a connection of its own.
Every step that changes anything carries the epoch, so a thread that acts on old knowledge is refused by Redis, not by hope.

One epoch
---------
::

    elected -> adopt: living owners' tickets from the index, dead incarnations taken back, all of `master` read in id order
            -> read new entries, plan, hand over, free what is reported ...
            -> a reply that is not sure: new epoch, memory dropped, adopt again
            -> FENCED: somebody else leads; memory dropped, standby

What goes wrong, and what then
------------------------------
==================================  ===============================================================================================
a consumer's lease ends             its entries go to ``master`` page by page, then to others, oldest first, with a new fence
a consumer's health URL is silent   its lease is revoked after k failures (it cannot renew), and ends by itself
the leader dies                     a standby is elected when the leader lease ends, and adopts
the leader is paused                its first call after waking is answered FENCED
a reply of Redis is lost            a new epoch refuses the late command; everything is read again
a report over HTTP is lost          the reconciling look at quiet tickets frees them
==================================  ===============================================================================================
"""
