"""The master: reads a ticket stream and delegates each entry to a registered consumer by ticket affinity. Its threads,
and what goes wrong: docs/architecture.md."""
