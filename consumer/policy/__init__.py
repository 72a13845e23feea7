"""Decisions of the consumer: values in, named decisions out. No Redis, clock, threads, randomness or logging in
here."""
