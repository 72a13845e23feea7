"""Measure the system on one machine against the same Redis without any order. Run it with ``python -m benchmarks``."""
