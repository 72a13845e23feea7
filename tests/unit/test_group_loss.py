"""Where a lost group begins again: the table row by row, and every small case against what it is for."""

from __future__ import annotations

import itertools

from usher.common.protocol.stream_id import GroupPosition, Span, rank
from usher.master.policy.group_loss import Memory, reached, restart, set_back

DONE = GroupPosition(b"20-0", None)
OPEN = GroupPosition(b"20-0", b"10-0")
BELOW_OPEN = b"9-18446744073709551615"


def test_what_was_handed_over_after_the_position_was_saved_is_said_to_repeat() -> None:
    whole = Span(b"1-0", b"30-0")
    assert restart(DONE, whole, taken=b"26-0") == (b"20-0", (b"20-1", b"26-0"), None)
    assert restart(OPEN, whole, taken=b"30-0") == (BELOW_OPEN, (b"10-0", b"30-0"), None)
    assert restart(OPEN, whole, taken=b"15-0") == restart(OPEN, whole)
    assert restart(OPEN, whole, taken=b"31-0") == restart(OPEN, whole), "it is of another stream"
    assert restart(DONE, Span(b"23-0", b"30-0"), taken=b"25-0") == (b"20-0", (b"23-0", b"25-0"), None), (
        "and nobody knows of anything lost"
    )
    assert restart(DONE, Span(None, b"30-0"), taken=b"25-0") == (b"20-0", None, None)
    assert restart(DONE, whole, saved=False, taken=b"25-0") == (b"0-0", (b"1-0", b"25-0"), None)


def test_what_another_master_saved_since_counts_alone() -> None:
    assert reached(GroupPosition(b"30-0", None), Memory(OPEN).read(b"21-0", b"25-0")) == GroupPosition(b"30-0", None)
    assert reached(OPEN, Memory()) == OPEN
    assert reached(OPEN, Memory().read(b"21-0", b"25-0")) == OPEN, (
        "without a position of its own a master cannot tell what it has missed"
    )


def test_every_small_case_keeps_what_it_is_for() -> None:
    """Streams of up to five entries, any of them done, deleted or read by the group: nothing that is left and not done
    is skipped, what comes again was announced, and what is announced as lost covers all that is lost."""
    cases = 0
    for delivered in range(1, 5):
        for done in itertools.product((False, True), repeat=delivered):
            for kept in itertools.product((False, True), repeat=5):
                _check_small_case(delivered, done, kept)
                cases += 1
    assert cases == (2 + 4 + 8 + 16) * 32


def _check_small_case(delivered: int, done: tuple[bool, ...], kept: tuple[bool, ...]) -> None:
    """Entries 1-0 .. 5-0; the group had read the first ``delivered`` of them."""
    entries = [b"%d-0" % n for n in range(1, 6)]
    open_ids = [entry for entry, is_done in zip(entries, done, strict=False) if not is_done]
    left = [entry for entry, is_kept in zip(entries, kept, strict=True) if is_kept]
    position = GroupPosition(entries[delivered - 1], open_ids[0] if open_ids else None)
    start, repeat, lost = restart(position, Span(left[0] if left else None, entries[-1]))
    comes = {entry for entry in left if rank(entry) > rank(start)}
    assert set(left) - set(entries[:delivered]) <= comes, "what was never read comes"
    assert set(open_ids) & set(left) <= comes, "what was not done comes"
    assert comes & set(entries[:delivered]) <= _between(repeat, entries)
    # A hole in the middle is not seen by looking at the ends of the stream; what the stream lost at its beginning is.
    trimmed = {entry for entry in open_ids if not left or rank(entry) < rank(left[0])}
    assert trimmed <= _between(lost, entries)
    assert not _between(lost, entries) & set(left)


def _between(ends: tuple[bytes, bytes] | None, entries: list[bytes]) -> set[bytes]:
    if ends is None:
        return set()
    return {entry for entry in entries if rank(ends[0]) <= rank(entry) <= rank(ends[1])}


def test_what_redis_forgot_that_a_master_knows_comes_again_or_is_lost() -> None:
    """A power loss takes the last moments of the group, or of the stream too."""
    known = Memory(GroupPosition(b"20-0", None)).read(b"21-0", b"30-0")
    assert set_back(known, b"30-0", b"40-0") == (None, None)
    assert set_back(known, b"35-0", b"40-0") == (None, None), "another master went on"
    assert set_back(known, b"25-0", b"40-0") == ((b"25-1", b"30-0"), None)
    assert set_back(known, b"25-0", b"28-0") == ((b"25-1", b"28-0"), (b"28-1", b"30-0"))
    assert set_back(known, b"25-0", b"25-0") == (None, (b"25-1", b"30-0"))
    assert set_back(Memory(GroupPosition(b"20-0", None)), b"10-0", b"20-0") == ((b"10-1", b"20-0"), None)
    assert set_back(Memory(), b"0-0", b"40-0") == (None, None)


def test_a_master_that_outlives_redis_last_moments_keeps_what_it_knew_until_somebody_else_leads() -> None:
    """Its own lead is in doubt, and it looks before the next election: the position that fell back is nobody's news."""
    before, fell = GroupPosition(b"20-0", None), GroupPosition(b"18-0", None)
    known = Memory(before).read(b"21-0", b"30-0")
    looked = known.followed(fell).followed(fell)
    assert set_back(looked, b"18-0", b"40-0") == ((b"18-1", b"30-0"), None)
    assert looked.followed(before).noted == before
    moved = GroupPosition(b"19-0", None)
    assert looked.followed(moved) == Memory(moved), "another leader has declared it"
    assert known.followed(GroupPosition(b"35-0", None)) == Memory(GroupPosition(b"35-0", None))
    assert Memory().followed(fell) == Memory(fell)
    assert known.followed(before) == known
