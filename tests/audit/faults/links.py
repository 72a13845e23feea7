"""Faults between the run log, the stream and the dead letters: what is lost, ran under another name, or is there twice."""

from __future__ import annotations

import time

from tests.audit.faults import DONE, fault
from tests.audit.seeding import GROUP, Seeder
from usher.common.redis.client import Link


@fault(ticket_differs="5-1")
def under_another_ticket(s: Seeder, link: Link) -> None:
    s.ran("c1:1", ("5-1", "z", 5, 500, 550))


@fault(ticket_differs="5-1")
def without_its_ticket(s: Seeder, link: Link) -> None:
    s.ran("c1:1", ("5-1", "", 5, 500, 550))


@fault(ticket_differs="5-1")
def twice_under_another_ticket(s: Seeder, link: Link) -> None:
    s.ran("c1:1", DONE, ("5-1", "z", 5, 600, 650))


@fault(ticket_differs="1-1")
def twice_under_another_ticket_and_cut_from_the_stream(s: Seeder, link: Link) -> None:
    s.ran("c1:1", DONE, ("1-1", "z", 5, 600, 650))
    link.call("XTRIM", s.keys.stream, "MINID", "3-1")


# ---- ids -------------------------------------------------------------------------------------------------------------


@fault(unread_and_run="99-1")
def of_an_id_that_never_was(s: Seeder, link: Link) -> None:
    s.ran("c1:1", DONE, ("99-1", "z", 5, 600, 650))


@fault(unread_and_run="3-7")
def of_an_id_between_others(s: Seeder, link: Link) -> None:
    s.ran("c1:1", DONE, ("3-7", "z", 5, 600, 650))


@fault(unread_and_run="7-1")
def before_it_was_read(s: Seeder, link: Link) -> None:
    s.add(("7-1", "z"))
    s.ran("c1:1", DONE, ("7-1", "z", 5, 600, 650))


@fault(unread_and_run="4-1 5-1")
def group_set_back(s: Seeder, link: Link) -> None:
    s.ran("c1:1", DONE)
    link.call("XGROUP", "SETID", s.keys.stream, s.keys.group, "3-1")


# ---- losses ----------------------------------------------------------------------------------------------------------


@fault(lost="5-1")
def acknowledged_by_hand(s: Seeder, link: Link) -> None:
    """5-1 is over and in no record; other streams have records that cannot be read."""


@fault(lost="7-1")
def acknowledged_by_hand_without_a_ticket(s: Seeder, link: Link) -> None:
    s.ran("c1:1", DONE)
    link.call("XADD", s.keys.stream, "7-1", "text", "no ticket")
    s.read()
    s.over("7-1")


@fault(lost="5-1")
def failed_and_acknowledged_by_hand(s: Seeder, link: Link) -> None:
    s.ran("c1:1", (*DONE, "failed"))


@fault(lost="6-1", index_without_pending="6-1")
def deleted_with_its_consumer(s: Seeder, link: Link) -> None:
    s.ran("c1:1", DONE)
    link.call("XGROUP", "DELCONSUMER", s.keys.stream, s.keys.group, "c1:1")


@fault(lost="7-1 8-1")
def group_set_forward(s: Seeder, link: Link) -> None:
    s.ran("c1:1", DONE)
    s.add(("7-1", "a"), ("8-1", "z"))
    link.call("XGROUP", "SETID", s.keys.stream, s.keys.group, "$")


@fault(lost="7-1")
def read_by_a_stranger_that_acknowledges(s: Seeder, link: Link) -> None:
    s.ran("c1:1", DONE)
    s.add(("7-1", "z"))
    link.call("XREADGROUP", "GROUP", GROUP, "other", "NOACK", "STREAMS", s.keys.stream, ">")


@fault(cut_unread="")
def cut_before_it_was_read(s: Seeder, link: Link) -> None:
    s.over("6-1")
    link.call("HDEL", s.keys.tickets, "b")
    s.ran("c1:1", DONE, ("6-1", "b", 5, 600, 650))
    s.add(("7-1", "z"))
    link.call("XTRIM", s.keys.stream, "MAXLEN", 0)
    s.add(("8-1", "z"))


@fault(cut_unread="")
def cut_unread_as_was_counted(s: Seeder, link: Link) -> None:
    s.ran("c1:1", DONE)
    link.call("HSET", s.keys.counters, "unread_cut", 1, "unread_cut_s", int(time.time()))


@fault()
def deleted_inside(s: Seeder, link: Link) -> None:
    """It is told as not proven."""
    s.ran("c1:1", DONE)
    link.call("XDEL", s.keys.stream, "3-1")


# ---- dead letters ----------------------------------------------------------------------------------------------------


@fault(letter_missing="5-1")
def given_up_without_a_letter(s: Seeder, link: Link) -> None:
    s.ran("c1:1", (*DONE, "gave_up"))


@fault()
def given_up_with_a_letter(s: Seeder, link: Link) -> None:
    s.ran("c1:1", (*DONE, "gave_up"))
    s.letter("5-1", "a")


@fault()
def given_up_and_sent_again(s: Seeder, link: Link) -> None:
    s.ran("c1:1", (*DONE, "gave_up"))
    link.call("XADD", s.keys.stream, "7-1", "ticket_id", "a", "uid", "5-1")
    s.read()
    s.over("7-1")
    s.ran("c1:1", ("7-1", "a", 5, 700, 750))


@fault()
def given_up_and_maybe_dropped(s: Seeder, link: Link) -> None:
    s.ran("c1:1", (*DONE, "gave_up"))
    link.call("XADD", s.keys.actions, "7-9", "outcome", "dropped 1", "what", "drop")


@fault(dead_and_done="5-1")
def dead_and_done(s: Seeder, link: Link) -> None:
    s.ran("c1:1", DONE)
    s.letter("5-1", "a")


@fault(dead_and_pending="6-1")
def dead_and_pending(s: Seeder, link: Link) -> None:
    s.ran("c1:1", DONE)
    s.letter("6-1", "b")


@fault(letters_twice="5-1")
def two_letters(s: Seeder, link: Link) -> None:
    s.ran("c1:1", (*DONE, "gave_up"))
    for _ in range(2):
        s.letter("5-1", "a")
