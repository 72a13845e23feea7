"""Plan the leader's hand-overs: tickets, their owners, live rules. Pure."""

from __future__ import annotations
