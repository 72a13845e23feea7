"""Histories for the checker's own test: a small model of a correct system, which writes down what a real run would.

Consumers own tickets under tokens, are killed and paused, wake up as zombies; the producer sends twice or does not
know; some messages are poison. Everything follows from the seed. Imports the standard library only, like the checker.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

Record = dict[str, Any]
MAX_ATTEMPTS = 3
_S = 1_000_000_000


@dataclass
class ModelTicket:
    """``todo``: (uid, stream id) not yet acknowledged, in stream order; ``at``: the next of them to start."""

    name: str
    todo: list[tuple[str, str]] = field(default_factory=list)
    at: int = 0
    owner: str = ""
    tok: int = 0
    opened: int = 0
    run: Record | None = None
    failures: int = 0


class Model:
    """One run; ``records`` is its history."""

    def __init__(self, seed: int, steps: int = 400) -> None:
        self._rng = random.Random(seed)
        self.records: list[Record] = []
        self._t = _S
        self._serial = 0
        self._tok = 0
        self._tickets = [ModelTicket(f"T{number}") for number in range(self._rng.randint(2, 6))]
        self._live = {f"c{number}/{100 + number}": True for number in range(3)}
        self._poison: set[str] = set()
        self._effects: dict[str, Record] = {}
        self._zombies: list[tuple[Record, ModelTicket]] = []
        self._dead: dict[str, tuple[str, int]] = {}
        self._accounts: dict[str, int] = {}
        for _ in range(steps):
            self._step(self._rng.choices(("send", "work", "kill", "pause", "wake"), (4, 12, 0.12, 0.12, 0.5))[0])
        self._finish()

    # ---- steps ---------------------------------------------------------------------------------------------------------------

    def _now(self) -> int:
        self._t += self._rng.randint(1_000, 40_000_000)
        return self._t

    def _note(self, k: str, **facts: Any) -> Record:
        record = {"k": k, **facts}
        self.records.append(record)
        return record

    def _step(self, what: str) -> None:
        if what == "send":
            self._send()
        elif what == "work":
            self._work(self._rng.choice(self._tickets))
        elif what == "wake" and self._zombies:
            self._wake(self._rng.randrange(len(self._zombies)))
        elif what in ("kill", "pause"):
            self._lose(self._rng.choice(list(self._live)), paused=what == "pause")

    def _send(self) -> None:
        self._serial += 1
        uid, ticket = f"u{self._serial}", self._rng.choice(self._tickets)
        answer = self._rng.choices(("ok", "info", "fail"), (20, 1, 1))[0]
        expect = "dlq" if self._rng.random() < 0.02 else "effect"
        if expect == "dlq":
            self._poison.add(uid)
        facts = {"uid": uid, "ticket": ticket.name, "expect": expect, "amount": self._serial}
        t = self._now()
        self._note("send", **facts, r=answer, t0=t, t1=self._now())
        if answer == "fail" or (answer == "info" and self._rng.random() < 0.5):
            return
        self._arrives(uid, ticket)
        if self._rng.random() < 0.05:
            self._note("send", **facts, r="ok", t0=self._now(), t1=self._now())
            self._arrives(uid, ticket)

    def _arrives(self, uid: str, ticket: ModelTicket) -> None:
        mid = f"{self._now()}-0"
        self._note("stream", mid=mid, uid=uid, ticket=ticket.name, t=self._t)
        ticket.todo.append((uid, mid))

    def _work(self, ticket: ModelTicket) -> None:
        if ticket.run is not None:
            self._end(ticket)
        elif ticket.at < len(ticket.todo):
            self._start(ticket)
        elif ticket.owner:
            ticket.todo, ticket.at, ticket.owner = [], 0, ""  # all acknowledged: free

    def _start(self, ticket: ModelTicket) -> None:
        if not ticket.owner:
            self._tok += self._rng.randint(1, 9)
            ticket.owner, ticket.tok = self._rng.choice(list(self._live)), self._tok
        ticket.opened = max(ticket.opened, ticket.tok)
        uid, mid = ticket.todo[ticket.at]
        facts = {"uid": uid, "mid": mid, "ticket": ticket.name, "tok": ticket.tok, "who": ticket.owner}
        ticket.run = self._note("start", x=f"x{len(self.records)}", **facts, attempt=1, t=self._now())

    def _end(self, ticket: ModelTicket) -> None:
        run, ticket.run = ticket.run, None
        assert run is not None
        uid = run["uid"]
        if uid in self._poison:
            self._note("finish", x=run["x"], ok=False, t=self._now())
            ticket.failures += 1
            if ticket.failures >= MAX_ATTEMPTS:
                self._dead[run["mid"]] = (uid, ticket.failures)
                ticket.failures = 0
                ticket.at += 1
            return
        self._commit(run)
        self._note("finish", x=run["x"], ok=True, t=self._now())
        ticket.at += 1

    def _commit(self, run: Record) -> None:
        if run["uid"] in self._effects:
            return
        n = len(self._effects) + 1
        self._effects[run["uid"]] = self._note(
            "commit", n=n, uid=run["uid"], ticket=run["ticket"], tok=run["tok"], who=run["who"], t=self._now()
        )
        amount = int(run["uid"].removeprefix("u"))  # of the n-th message
        self._accounts[run["ticket"]] = self._accounts.get(run["ticket"], 0) + amount

    def _lose(self, who: str, paused: bool) -> None:
        """A consumer is killed, or paused until its lease is over; another incarnation takes its place and its
        tickets."""
        t = self._now()
        self._note(
            "fault", kind="pause" if paused else "kill", who=who, t0=t, t1=t + 4 * _S, recover="", since=t, bound_ns=0
        )
        if not paused:
            self._note("die", who=who, t=t)
        del self._live[who]
        name, _, pid = who.partition("/")
        self._live[f"{name}/{int(pid) + 100}"] = True
        for ticket in self._tickets:
            if ticket.owner == who:
                if ticket.run is not None and paused:
                    self._zombies.append((ticket.run, ticket))
                given_up = [at + 1 for at, (_, mid) in enumerate(ticket.todo[: ticket.at]) if mid in self._dead]
                ticket.at = self._rng.randint(
                    max(given_up, default=0), ticket.at
                )  # acknowledgements that were not flushed
                ticket.owner, ticket.run, ticket.failures = "", None, 0

    def _wake(self, at: int) -> None:
        """A zombie goes on in its handler: the sink decides."""
        run, ticket = self._zombies.pop(at)
        fenced = run["tok"] < ticket.opened
        if fenced or run["uid"] in self._poison:
            self._note("fenced", x=run["x"], ticket=run["ticket"], tok=run["tok"], who=run["who"], t=self._now())
            self._note("finish", x=run["x"], ok=False, t=self._now())
        else:
            self._commit(run)
            self._note("finish", x=run["x"], ok=True, t=self._now())

    def _finish(self) -> None:
        while self._zombies:
            self._wake(0)
        for ticket in self._tickets:
            while ticket.run is not None or ticket.at < len(ticket.todo):
                self._work(ticket)
        for mid, (uid, count) in self._dead.items():
            self._note("dlq", uid=uid, mid=mid, attempts=count, reason="attempts_exhausted")
        for who in self._live:
            self._note("die", who=who, t=self._now())
        live = [f"{who.replace('/', ':')}" for who in self._live]
        left = {"members": [*live, "master"], "live": live, "keys": [], "quiet_ns": 1, "accounts": self._accounts}
        self._note("final", **dict.fromkeys(("pel", "lag", "tickets", "attempts"), 0), **left)
        self._note("terms", strict=False, max_attempts=MAX_ATTEMPTS, drain_ns=_S, must=[], tokens=True)
