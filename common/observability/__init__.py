"""Metrics, traces, and notifications of dead letters."""
