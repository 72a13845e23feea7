"""Gather many ticket streams into one work stream."""

from __future__ import annotations
