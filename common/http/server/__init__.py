"""Serve HTTP: gunicorn as one process, with a drain and push connections."""

from __future__ import annotations
