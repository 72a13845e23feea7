"""Plays the stories of ``tests/scenarios``: what happens above the line, what the leader does below it.

A story is a conversation: blocks of sentences, a line ``----``, and what the leader does after it has heard them, until
it has nothing more to do. ``python -m tests.story`` writes the answers of all stories anew; only commit the changes if
you understand what caused them.

==============================================  ======================================================================
sentence                                        means
==============================================  ======================================================================
window 2                                        most entries of one ticket that are handed over at a time (at the start)
consumers c1 c2 [room 3]                        these start; each may have so many messages
arrive 1-0 T1 / 2-0 T2                          the leader reads new entries
acknowledge 1-0 2-0 [without a report]          their owners are done with them
dead c1 [unnoticed]                             its lease ends [and the roster has not told yet]
drain c1 [unnoticed]                            it takes nothing more
give back T1                                    its draining owner returns the whole ticket
recover                                         the leader takes back what dead consumers have
stranger takes 1-0 T1                           somebody reads past the leader
sweep 1-0 2-0                                   the idle-message sweep finds these
reconcile                                       the leader compares with the index what nobody reported on
new leader                                      another master takes over
==============================================  ======================================================================
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.boards import may_plan
from tests.leader_model import Leader
from tests.redis_model import RedisModel
from usher.master.leader.entries import NO_NEW_ENTRIES, NewEntries
from usher.master.leader.leader_scripts import TakenPage
from usher.master.policy.board.plans import HandOverPlan, HandOverReply
from usher.master.policy.board.tickets import BoardTicket, Standing

FOLDER = Path(__file__).parent / "scenarios"
LINE = "----"
ROOM = 100


def _shown(ids: list[bytes] | tuple[bytes, ...]) -> str:
    return "[" + " ".join(entry_id.decode() for entry_id in ids) + "]"


def _name(incarnation: str) -> str:
    """First incarnations go by the consumer's name."""
    return incarnation.removesuffix(":1")


class _Told(RedisModel):
    """A model that tells what the leader did to it."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def hand_over(self, plan: HandOverPlan, news: NewEntries = NO_NEW_ENTRIES) -> HandOverReply:
        before = len(self.handed_over)
        reply = super().hand_over(plan, news)
        for handed in self.handed_over[before:]:
            self.lines.append(
                f"hand over {handed.ticket.decode()} {_shown(handed.ids)} to {_name(handed.target)} fence"
                f" {handed.fence}"
            )
        for target, answer in zip(plan.targets, reply.targets, strict=True):
            if answer.state != "OK":
                self.lines.append(f"refused: {_name(target.incarnation)} is {answer.state.lower()}")
            self.lines += [f"refused: {ticket.decode()} is not as the leader believes" for ticket in answer.refused]
        return reply

    def take_back(self, incarnation: str, count: int) -> TakenPage:
        page = super().take_back(incarnation, count)
        if page.found:
            self.lines.append(f"take back {_shown([found.id for found in page.found])} from {_name(incarnation)}")
        return page


class Story:
    """One story while it is played."""

    def __init__(self) -> None:
        self._redis = _Told()
        self._window = 512
        self._leader = Leader(self._redis, self._window)
        self._generations: dict[str, int] = {}
        self._parked: dict[bytes, str] = {}
        self._sentences: list[tuple[str, Callable[..., None]]] = [
            (r"window (\d+)", self._set_window),
            (r"consumers ([\w ]+?)(?: room (\d+))?", self._start),
            (r"arrive (.+)", self._arrive),
            (r"acknowledge ([\d -]+?)( without a report)?", self._acknowledge),
            (r"dead (\w+)( unnoticed)?", self._die),
            (r"drain (\w+)( unnoticed)?", self._drain),
            (r"give back (\w+)", self._give_back),
            (r"recover", self._recover),
            (r"stranger takes (\S+) (\w+)", self._stranger),
            (r"sweep ([\d -]+)", self._sweep),
            (r"reconcile", self._reconcile),
            (r"new leader", self._new_leader),
        ]

    def hear(self, sentence: str) -> None:
        """One thing happens."""
        for pattern, happen in self._sentences:
            found = re.fullmatch(pattern, sentence)
            if found:
                happen(*found.groups())
                return
        raise ValueError(f"nobody understands {sentence!r}")

    def answer(self) -> list[str]:
        """What the leader does now."""
        leader = self._leader
        while leader.unsure or may_plan(leader.board):
            leader.read_records(sorted(leader.unsure))
            leader.hand_over()
        parked = {
            name: self._why_parked(ticket) for name, ticket in sorted(leader.board.tickets.items()) if ticket.parked
        }
        told = [line for name, line in parked.items() if self._parked.get(name) != line]
        self._parked = parked
        lines, self._redis.lines = self._redis.lines + told, []
        assert not self._redis.broken, self._redis.broken
        return lines or ["nothing"]

    def _why_parked(self, ticket: BoardTicket) -> str:
        owner = ticket.owner
        if ticket.standing is Standing.RECOVERING or (
            owner is not None and self._leader.recoverer.has(owner.incarnation)
        ):
            why = "its owner is in recovery"
        elif ticket.standing is not Standing.OPEN:
            why = ticket.standing.value
        elif owner is None:
            why = "nobody has room" if self._leader.board.consumers else "nobody is there"
        elif not owner.accepts:
            why = f"{_name(owner.incarnation)} still has it and takes nothing more"
        else:
            why = (
                "its window is full"
                if len(ticket.running) >= self._window
                else f"{_name(owner.incarnation)} has no room"
            )
        return f"park {ticket.name.decode()} {_shown(list(ticket.parked))}: {why}"

    # ---- sentences -----------------------------------------------------------------------------------------------------------

    def _set_window(self, window: str) -> None:
        self._window = int(window)
        self._leader = Leader(self._redis, self._window)

    def _start(self, names: str, room: str | None) -> None:
        for name in names.split():
            generation = self._generations[name] = self._generations.get(name, 0) + 1
            self._redis.register(f"{name}:{generation}", int(room or ROOM))
        self._look()

    def _look(self) -> None:
        self._leader.look_at(self._redis.roster())

    def _incarnation(self, name: str) -> str:
        return f"{name}:{self._generations[name]}"

    def _arrive(self, text: str) -> None:
        for entry in text.split("/"):
            entry_id, ticket = entry.split()
            self._leader.arrive(entry_id.encode(), ticket.encode())

    def _acknowledge(self, text: str, unreported: str | None) -> None:
        for entry_id in text.encode().split():
            ticket, owner = self._redis.ticket_of[entry_id], self._redis.pending[entry_id]
            done = self._redis.ack(owner, ticket, [entry_id])
            assert done, f"{owner} may not acknowledge {entry_id!r}"
            if not unreported:
                self._leader.board.acknowledged(owner, ticket, done, 0.0)

    def _die(self, name: str, unnoticed: str | None) -> None:
        del self._redis.leases[self._incarnation(name)]
        if not unnoticed:
            self._look()

    def _drain(self, name: str, unnoticed: str | None) -> None:
        self._redis.leases[self._incarnation(name)] = "draining"
        if not unnoticed:
            self._look()

    def _give_back(self, ticket: str) -> None:
        self._redis.give_back(self._redis.index[ticket.encode()].owner, ticket.encode())

    def _recover(self) -> None:
        self._look()
        while self._leader.recovers:
            self._leader.recover()

    def _stranger(self, entry_id: str, ticket: str) -> None:
        self._redis.add(entry_id.encode(), ticket.encode())
        self._redis.read_by("stranger")

    def _sweep(self, text: str) -> None:
        self._leader.take_in(self._redis.sweep(text.encode().split()))

    def _reconcile(self) -> None:
        self._leader.now_s += 1.0
        self._leader.reconcile()

    def _new_leader(self) -> None:
        self._leader = Leader.adopt(self._redis, self._window)


def blocks(text: str) -> Iterator[tuple[list[str], list[str], list[str]]]:
    """(comments, sentences, answers) of each block of a story."""
    for block in text.strip().split("\n\n"):
        heard, _, answered = (block + "\n").partition(f"\n{LINE}\n")
        lines = heard.splitlines()
        comments = [line for line in lines if line.startswith("#")]
        yield comments, [line for line in lines if not line.startswith("#")], answered.splitlines()


def played(text: str) -> str:
    """The story with the answers that are given now."""
    story = Story()
    told = []
    for comments, sentences, _ in blocks(text):
        for sentence in sentences:
            story.hear(sentence)
        told.append("\n".join([*comments, *sentences, LINE, *story.answer()]))
    return "\n\n".join(told) + "\n"


def main() -> None:
    """Write the answers anew."""
    for file in sorted(FOLDER.glob("*.txt")):
        text = file.read_text(encoding="utf-8")
        again = played(text)
        if again != text:
            file.write_text(again, encoding="utf-8")


if __name__ == "__main__":
    main()
