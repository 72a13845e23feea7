"""Decisions of the master: values in, named decisions out. No Redis, clock, threads, randomness or logging in here."""
