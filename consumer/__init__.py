"""The consumer: it runs a handler on what is handed over to it, every ticket's messages in order, one at a time. Its
threads, and which attempts are counted: docs/architecture.md."""
