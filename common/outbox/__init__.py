"""The outbox: an application's commit and its messages can never disagree; and log consumers, whose effects happen
exactly once.

::

    application       one SQL transaction: its own rows, and a row in staged_log_records
                      (writer.py, or plain SQL: queries.sql)
    `usher streamer`  rows -> entries of the ticket stream, in order; then the rows are deleted
                      (master/streamer/streamer.py, store.py, rows.py)
    the stream        what every reader sees: the masters' groups, and
    LogConsumer       one SQL transaction: effects, state, checkpoint (log_consumer.py)
    `usher trim`      cuts what no group and no checkpoint needs any more (master/operations/trimming.py)

These steps also hold when one of them fails:

==============================  =======================================================================================
the application rolls back      the row never existed: nothing is emitted
the streamer dies before Redis  the rows are still there and are sent (again)
has answered
a reply of Redis is lost        a new epoch first, so that the late command is refused; then the rows are sent again, in
                                smaller batches
the streamer dies before rows   they are sent again: the same uid, one effect
are deleted
two streamers                   one leads, by a lease in Redis; the script that adds entries checks the epoch
transactions commit out of id   rows are deleted by their own ids; a lower one that becomes visible later is sent later
order
a row cannot become a message   it moves to refused_log_records with the reason; the others go on
a LogConsumer dies before its   nothing of the batch is stored: it is read again
commit
a LogConsumer dies after its    its checkpoint in Redis lags behind the one in SQL; less is trimmed, nothing is repeated
commit
a record comes twice            its uid is known: the function never sees it again (if not more than ``remember``
                                others came between)
the stream was lost or cut      LogLost, with what was found; it stands still until an operator resets it
under a LogConsumer
==============================  =======================================================================================

Order: records of one ticket are sent in the order in which their transactions committed. In SQLite that is id order,
because there is one writer at a time. In PostgreSQL and MySQL a trigger makes it so (schema_*.sql).
"""
