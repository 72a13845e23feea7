"""Per ticket a prefix in the order of finishing; one batch under way; an unsure one goes again before anything
later."""

from __future__ import annotations

import random

import pytest

from usher.consumer.policy.acks import AckLedger, Finished, Linger, linger


def finished(ticket: bytes, number: int) -> Finished:
    return Finished(ticket, b"%d-0" % number, 1, 1, 0, 0)


def filled(*items: tuple[bytes, int], most: int = 500) -> AckLedger:
    ledger = AckLedger(most)
    for ticket, number in items:
        ledger.add(finished(ticket, number))
    return ledger


@pytest.mark.parametrize(
    ("strict", "spare", "window", "waits"),
    [
        (False, 1992, 512, Linger(0.02, 200)),
        (False, 1992, 256, Linger(0.02, 200)),
        (False, 1992, 255, Linger(0.005, 200)),
        (True, 1992, 512, Linger(0.005, 200)),
        (False, 12, 512, Linger(0.02, 6)),
        (False, 0, 512, Linger(0.02, 1)),
        (False, -3, 512, Linger(0.02, 1)),
    ],
)
def test_finished_messages_wait_for_more_unless_somebody_waits_for_them(
    strict: bool, spare: int, window: int, waits: Linger
) -> None:
    assert linger(0.02, strict, spare, window) == waits


def test_nothing_finished_is_nothing_to_do() -> None:
    ledger = AckLedger(500)
    assert ledger.next_batch() is None
    assert len(ledger) == 0


def test_a_batch_has_the_ids_of_each_ticket_in_the_order_they_finished() -> None:
    batch = filled((b"A", 1), (b"B", 2), (b"A", 3), (b"A", 10)).next_batch()
    assert batch is not None
    assert batch.by_ticket == {b"A": [b"1-0", b"3-0", b"10-0"], b"B": [b"2-0"]}
    assert [item.stream_id for item in batch.finished] == [b"1-0", b"2-0", b"3-0", b"10-0"]


def test_a_batch_that_is_unsure_goes_again_unchanged_whatever_finished_since() -> None:
    ledger = filled((b"A", 1))
    first = ledger.next_batch()
    ledger.add(finished(b"A", 2))
    assert ledger.next_batch() is first
    assert len(ledger) == 2
    ledger.settle()
    second = ledger.next_batch()
    assert second is not None
    assert second.by_ticket == {b"A": [b"2-0"]}


def test_what_is_under_way_still_counts_until_redis_answered() -> None:
    ledger = filled((b"A", 1), (b"A", 2))
    ledger.next_batch()
    assert len(ledger) == 2
    ledger.settle()
    assert len(ledger) == 0


def test_a_batch_is_cut_at_its_most_and_the_rest_comes_next() -> None:
    ledger = filled(*((b"A", number) for number in range(1, 8)), most=3)
    taken = []
    while (batch := ledger.next_batch()) is not None:
        assert len(batch.finished) <= 3
        taken.append(batch.by_ticket[b"A"])
        ledger.settle()
    assert taken == [[b"1-0", b"2-0", b"3-0"], [b"4-0", b"5-0", b"6-0"], [b"7-0"]]


def test_whatever_fails_in_between_every_ticket_is_acknowledged_in_order() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        ledger = AckLedger(rng.randint(1, 5))
        handled: dict[bytes, list[bytes]] = {}
        written: dict[bytes, list[bytes]] = {}
        for number in range(200):
            ticket = rng.choice([b"A", b"B", b"C"])
            ledger.add(finished(ticket, number))
            handled.setdefault(ticket, []).append(b"%d-0" % number)
            batch = ledger.next_batch()
            if batch is not None and rng.random() < 0.7:
                ledger.settle()
                for name, entry_ids in batch.by_ticket.items():
                    written.setdefault(name, []).extend(entry_ids)
            assert all(handled[name][: len(entry_ids)] == entry_ids for name, entry_ids in written.items())


def test_what_finishes_later_is_not_taken_with_what_is_here() -> None:
    """What failed before it is not among the failures that were written first."""
    ledger = AckLedger(3)
    for number in range(1, 6):
        ledger.add(finished(b"A", number))
    sizes, left = [], len(ledger)
    while left > 0 and (batch := ledger.next_batch(left)) is not None:
        assert ledger.next_batch(1) is batch, "it goes again, unchanged"
        ledger.settle()
        sizes.append(len(batch.finished))
        left -= sizes[-1]
        ledger.add(finished(b"A", 10 + len(sizes)))
    assert (sizes, len(ledger)) == ([3, 2], 2)
