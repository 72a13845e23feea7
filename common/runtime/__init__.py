"""Run one process: settings, services, signals, locks, health."""
