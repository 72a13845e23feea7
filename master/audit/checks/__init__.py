"""Prove the promise, or find what breaks it."""

from __future__ import annotations
