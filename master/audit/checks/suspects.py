"""Suspects: what the first look passes to the second, counted in full per check and stream, and the first few thousand
by name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from usher.master.audit.checks.findings import Example

#: The most suspects of one check and stream that are looked at again, lowest ids first. The others are only counted.
LOOKED_AT = 2000
#: Confirmed suspects that a report shows.
SHOWN = 10
#: (check, its cause, what both are about): what follows from another finding is not told beside it.
_DERIVED = (("owners_differ", "ticket_owned_twice", "ticket"), ("index_without_pending", "lost", "id"))


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


def fold(
    found: Mapping[tuple[str, str], tuple[int, Sequence[Example]]],
) -> dict[tuple[str, str], tuple[int, list[Example]]]:
    """Return findings, (check, stream) -> (count, examples), without those that follow from others."""
    folded = {place: (count, list(examples)) for place, (count, examples) in found.items()}
    for derived, cause, about in _DERIVED:
        for (check, stream), (count, examples) in folded.items():
            if check == derived:
                _, causes = folded.get((cause, stream), (0, []))
                known = {getattr(one, about) for one in causes}
                left = [one for one in examples if getattr(one, about) not in known]
                folded[check, stream] = count - len(examples) + len(left), left
    return folded
