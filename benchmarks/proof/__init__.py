"""The proof from the archive, over a simulated history: ``python -m benchmarks prove``."""
