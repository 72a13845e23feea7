"""The outbox: an application's commit and its messages can never disagree; and log consumers, whose effects happen
exactly once.

::

    application       one SQL transaction: its own rows, and a row in staged_log_records
                      (store.py, or plain SQL: queries.sql)
    `usher streamer`  rows -> entries of the ticket stream, in order; then the rows are deleted
                      (master/streamer/program.py, store.py, rows.py)
    the stream        what every reader sees: the masters' groups, and
    LogConsumer       one SQL transaction: effects, state, checkpoint (log_consumer.py)
    `usher trim`      cuts what no group and no checkpoint needs any more (master/operations/trimming.py)

What holds when one of these steps fails: docs/outbox.md.
"""
