"""Sinks: the places that store a handler's effects, so that each happens exactly once: docs/sinks.md."""
