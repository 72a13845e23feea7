"""Measuring: the system on one machine against what the same Redis does without any order at all. Used by ``usher
bench``."""
