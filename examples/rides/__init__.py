"""Rocket rides: the acceptance example of the outbox, with faults on. Run it with ``python -m examples.rides``; a test
does too.

An API (``POST /rides``, with an idempotency key) inserts rides, each with its outbox row; every tenth call fails after
all of its work and is made again, as is every tenth that was answered. A streamer sends every tenth batch twice. Two
consumers add up the distances and crash before every tenth commit. All three are killed outright half-way, and come
back. Every second what they have is reconciled with the *source table*, of which in the end each must have every ride
exactly once: two consumers that agree with each other may both have lost the same.

The faults are in this folder only: a streamer and a function of the example's own. The programs that you run have no
switch for them.
"""
