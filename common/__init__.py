"""Hold what the master and the consumer share: names, keys, reply shapes, atomic steps. It imports neither of them. The
words for these things: docs/architecture.md."""
