"""What is stored in Redis and sent between the programs: keys, ids, messages, records. Pure."""

from __future__ import annotations
