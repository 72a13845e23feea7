"""What the first look hands to the second: suspects per check and stream, counted in full, and the first few thousand
of them by name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from usher.master.audit.checks.findings import Example

#: Suspects of one check and stream that are looked at again, lowest ids first. Beyond that only the number is known.
LOOKED_AT = 2000
#: Confirmed ones that a report shows.
SHOWN = 10


class Suspects:
    """Filled by the proofs, emptied by the job."""

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str], int] = defaultdict(int)
        self.named: dict[tuple[str, str], list[Example]] = defaultdict(list)

    def add(self, check: str, stream: str, count: int, examples: Iterable[Example]) -> None:
        """``count`` suspects, of which some are ``examples``."""
        if count:
            self.counts[check, stream] += count
            self.named[check, stream] += examples
