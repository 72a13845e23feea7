"""Rocket rides: the acceptance example of the outbox, with faults on. Run it with ``python -m examples.rides``; a test
does too.

An API inserts rides (and takes some back by a rollback), each with its outbox row. A streamer sends every tenth batch
twice. Two consumers add up the distances and crash before every tenth commit. All three are killed outright half-way,
and come back. In the end each consumer must have every ride of the *source table* exactly once: two consumers that
agree with each other may both have lost the same.

The faults are in this folder only: a streamer and a function of the example's own. The programs that you run have no
switch for them.
"""
