"""Suspects: what the first look passes to the second, counted in full per check and stream, and the first few thousand
by name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from usher.master.audit.checks.findings import Example

#: The most suspects of one check and stream that are looked at again, lowest ids first. The others are only counted.
LOOKED_AT = 2000
#: Confirmed suspects that a report shows.
SHOWN = 10


class Suspects:
    """The suspects of one audit: filled by the proofs, emptied by the job."""

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str], int] = defaultdict(int)
        self.named: dict[tuple[str, str], list[Example]] = defaultdict(list)

    def add(self, check: str, stream: str, count: int, examples: Iterable[Example]) -> None:
        """Add ``count`` suspects, of which some are ``examples``."""
        if count:
            self.counts[check, stream] += count
            self.named[check, stream] += examples
