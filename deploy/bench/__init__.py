"""Measure throughput and latency on the user's own Redis: `usher bench`."""
