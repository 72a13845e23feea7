"""Sinks: the places that store a handler's effects, so that each happens exactly once although messages may be handled
twice.

Three things can go wrong with an effect, whatever system delivers the message:

* the handler's process dies after the effect and before the acknowledgement: the message comes again;
* a producer, or the relay before it, sends the message twice: two entries with the same ``uid``;
* a *zombie*: a process stands still in the middle of a handler for longer than its lease, its ticket goes on elsewhere
  under a higher fence, and then the process wakes up and does what it was about to do.

Asking first (``still_mine()``, "is the uid known?") prevents none of them: the process can stand still right after the
answer. The place that stores the effect must check, in the same atomic step. Usher has these for it:

==================  ====================================  =======================================================
place               module                                made atomic by
==================  ====================================  =======================================================
SQLite, PostgreSQL  ``usher.consumer.sinks.sql``          fence, uid and effect in one transaction
the same, async     ``usher.consumer.sinks.sql_async``    the same, for ``async def`` handlers
Redis               ``usher.consumer.sinks.redis_guard``  fence, uid and commands in one script
an HTTP service     ``usher.consumer.sinks.http``         two headers, which the service keeps in one transaction
                                                          with its effect
==================  ====================================  =======================================================

The outcomes have names (``usher.consumer.sinks.outcomes``): a *duplicate* counts as done; a *stale fence* means that
nothing was stored, since the ticket has another owner; *not now* means that the same message is tried again later, and
nothing is lost.

In a rehearsal (a dry run: ``usher rehearse``, ``message.is_rehearsal``) the SQL sinks roll back what they have run, and
RedisGuard does nothing.

``usher torture module:function`` runs a handler against all of this and reports what became of its effects.
"""
