"""Which consumer gets a ticket that nobody has: the rows of the decision, one by one."""

from __future__ import annotations

import math

from usher.master.policy.board.placement import Affinity, OpenConsumers
from usher.master.policy.board.tickets import BoardTicket, ConsumerLoad, WorkPace

BEST, SECOND, THIRD = Affinity(["c1", "c2", "c3"]).ranking(b"42")


def consumer(name: str, in_flight: int = 0, slots: int = 2, capacity: int = 100, generation: int = 1) -> ConsumerLoad:
    pace = WorkPace(slots, capacity, math.inf)
    tickets = {b"%d" % number: None for number in range(in_flight)}
    return ConsumerLoad(f"{name}:{generation}", name, slots, capacity, True, pace, in_flight, tickets=tickets)


def chosen(*consumers: ConsumerLoad, home: str = "") -> str:
    ticket = BoardTicket(b"42")
    ticket.home = home
    everybody = OpenConsumers(consumers)
    found = everybody.choose(ticket, everybody.bound(sum(one.in_flight for one in consumers)))
    return "" if found is None else found.incarnation


def test_its_former_consumer_gets_it_after_a_crash_if_it_is_back() -> None:
    everybody = (consumer(BEST), consumer(SECOND), consumer(THIRD, generation=2))
    assert chosen(*everybody, home=THIRD) == f"{THIRD}:2"
    assert chosen(*everybody, home="gone") == f"{BEST}:1"


def test_one_above_the_bound_is_passed_over() -> None:
    """30 in flight: the mean is 10, the bound 13."""
    assert chosen(consumer(BEST, 13), consumer(SECOND, 8), consumer(THIRD, 9)) == f"{SECOND}:1"
    assert chosen(consumer(BEST, 12), consumer(SECOND, 9), consumer(THIRD, 9)) == f"{BEST}:1"
    assert chosen(consumer(BEST, 13), consumer(SECOND, 8), consumer(THIRD, 9), home=BEST) == f"{SECOND}:1"


def test_one_with_a_free_handler_slot_is_never_above_the_bound() -> None:
    assert chosen(consumer(BEST, 5, slots=6), consumer(SECOND), consumer(THIRD)) == f"{BEST}:1"
    assert chosen(consumer(BEST, 6, slots=6), consumer(SECOND), consumer(THIRD)) == f"{SECOND}:1"


def test_when_all_that_rank_are_above_the_bound_the_least_loaded_one_gets_it() -> None:
    """With very many consumers only the first of the ranking are asked."""
    names = [f"c{number}" for number in range(100)]
    ranked = set(Affinity(names).ranking(b"42"))
    idle = next(name for name in names if name not in ranked)
    everybody = [consumer(name, 0 if name == idle else 80 if name in ranked else 20) for name in names]
    assert chosen(*everybody) == f"{idle}:1"


def test_load_is_compared_as_a_part_of_capacity() -> None:
    names = [f"c{number}" for number in range(100)]
    ranked = set(Affinity(names).ranking(b"42"))
    large = next(name for name in names if name not in ranked)
    everybody = [
        consumer(name, 60 if name == large else 80 if name in ranked else 50, capacity=1000 if name == large else 100)
        for name in names
    ]
    assert chosen(*everybody) == f"{large}:1"


def test_room_is_what_all_can_take_and_too_much_on_one_takes_nothing_from_another() -> None:
    assert OpenConsumers([consumer("c1", 10), consumer("c2", 100), consumer("c3", 150)]).room == 90
    assert OpenConsumers([]).room == 0
    assert OpenConsumers([]).bound(10) == 0


def test_of_two_incarnations_of_a_name_the_later_one_has_it() -> None:
    """A look at the roster that is older than the successor's registration brings its predecessor back for a moment."""
    former, later = consumer(BEST, generation=9), consumer(BEST, generation=10)
    assert chosen(former, later) == chosen(later, former) == f"{BEST}:10"


def test_one_that_was_full_is_looked_at_again_when_it_is_not() -> None:
    """Where a thousand are busy only those with room are looked at."""
    full, other = consumer(BEST, 1, slots=1, capacity=1), consumer(SECOND, 99, slots=1)
    everybody = OpenConsumers([full, other])
    assert everybody.room == 1
    assert everybody.choose(BoardTicket(b"42"), 0) is other
    everybody.has_room_again(full)
    full.in_flight -= 1
    assert everybody.room == 2
    assert everybody.choose(BoardTicket(b"42"), 0) is full


def test_one_that_does_not_accept_work_is_not_there_and_does_not_come_back_by_having_room() -> None:
    draining, former = consumer(BEST, 1, capacity=1), consumer(SECOND, 1, capacity=1)
    draining.accepts = False
    everybody = OpenConsumers([draining, consumer(SECOND, generation=2)])
    for one in (draining, former):
        everybody.has_room_again(one)
        one.in_flight -= 1
    assert everybody.room == 100
    assert everybody.choose(BoardTicket(b"42"), 1) is not draining
