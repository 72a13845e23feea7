"""Add messages: the producer library, and helpers of the commands that send."""

from __future__ import annotations
