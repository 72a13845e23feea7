"""The producer and the tail: what goes into the stream, on a fixed schedule, and what the stream then has.

Open loop: a message is due at its time whatever the system does meanwhile. Everything follows from the seed.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from tests.chaos.checker.history import position
from tests.chaos.rig.records import HistoryWriter, now_ns
from tests.chaos.rig.wire import Refused, Unknown, Wire
from usher.common.protocol.keys import Keys

STREAM = "chaos"
_UID, _TICKET = b"uid", b"ticket_id"


@dataclass(frozen=True)
class Load:
    """What is sent. Parts are probabilities per message; ``work_ms`` is the median of a lognormal time of work."""

    rate: float = 150.0
    tickets: int = 100
    skew: float = 0.7  # ticket n comes with probability ~ n ** -skew
    work_ms: float = 30.0
    double_sends: float = 0.0
    fail_before: float = 0.0
    fail_after: float = 0.0
    poison: float = 0.0
    abort: float = 0.0
    die_again: float = 0.0  # the second start ends its process ...
    die_again_ms: int = 0  # ... after so long
    talks: bool = False  # users interrupt, clear, call while all runs (talk.py)
    sources: int = 0  # so many ticket streams, which Usher gathers; 0: one

    @property
    def streams(self) -> list[str]:
        return [f"{STREAM}:{number}" for number in range(self.sources)] or [STREAM]

    def told(self, stream: str, name: str) -> str:
        """A ticket or a uid as the history has it: producers of different streams do not know of each other's."""
        return f"{stream}/{name}" if self.sources else name


class Producer:
    """Sends on schedule from ``start`` to ``stop``."""

    def __init__(self, port: int, history: HistoryWriter, load: Load, seed: int) -> None:
        self._wire = Wire(port)
        self.history = history
        self.load = load
        self._rng = random.Random(seed)
        self._weights = list(itertools.accumulate((n + 1) ** -load.skew for n in range(load.tickets)))
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="producer", daemon=True)
        self._lock = threading.Lock()  # of the wire and the counts: scenarios send too
        self.sent = 0
        self.accepted: dict[str, int] = {}  # uid -> when its acceptance was known
        self.mids: dict[str, str] = {}  # stream id -> uid

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ending.set()
        if self._thread.ident is not None:
            self._thread.join(10)
        self._wire.close()

    def send(self, ticket: str, expect: str = "effect", **fields: str) -> str:
        """One message now. Returns its uid."""
        with self._lock:
            self.sent += 1
            uid = f"u{self.sent}"
        self._add(uid, ticket, expect, {"amount": str(self.sent), **fields})
        return uid

    def all_accepted(self) -> dict[str, int]:
        """All that Redis had taken before this call, in that order. One whose answer is still on its way is waited
        for."""
        with self._lock:
            return dict(self.accepted)

    def send_raw(self, expect: str, *parts: bytes | str) -> str | None:
        """An entry as it is, without a uid: the stream id is its uid. None when it was not accepted."""
        t0 = now_ns()
        with self._lock:
            try:
                mid = self._wire.call("XADD", STREAM, "*", *parts).decode()
            except (Refused, Unknown):
                return None
        shown = next((parts[at + 1] for at in range(0, len(parts), 2) if parts[at] in ("ticket_id", _TICKET)), "")
        ticket = shown.decode(errors="replace") if isinstance(shown, bytes) else shown
        self.history.write("send", uid=mid, ticket=ticket, expect=expect, amount=0, r="ok", t0=t0, t1=now_ns())
        return str(mid)

    def send_cutting(self, ticket: str, keep: int, group: str) -> tuple[list[str], list[str]]:
        """One message with MAXLEN, as tutorials show it. The ids that this cut: those that nobody had taken yet, and
        the others."""
        with self._lock:
            self.sent += 1
            uid, call, t0 = f"u{self.sent}", self._wire.call, now_ns()
            flat = ("ticket_id", ticket, "uid", uid, "amount", str(self.sent))
            call("MULTI")
            call("GET", Keys(STREAM, group).taken)
            call("XRANGE", STREAM, "-", "+")
            call("XADD", STREAM, "MAXLEN", str(keep), "*", *flat)
            call("XRANGE", STREAM, "-", "+")
            taken, before, mid, after = call("EXEC")
            self.mids[mid.decode()], self.accepted[uid] = uid, now_ns()
        self.history.write(
            "send", uid=uid, ticket=ticket, expect="effect", amount=int(uid[1:]), r="ok", t0=t0, t1=now_ns()
        )
        given, first = position(taken.decode().split()[0]), position(after[0][0].decode())
        cut = [entry_id.decode() for entry_id, _ in before if position(entry_id.decode()) < first]
        return [one for one in cut if position(one) > given], [one for one in cut if position(one) <= given]

    def took(self, uid: str, ticket: str, expect: str, amount: int, r: str, t0: int, mid: str = "") -> None:
        """Note what another one has sent."""
        with self._lock:
            t1 = now_ns()
            if r == "ok":
                self.mids[mid], self.accepted[uid] = uid, t1
        self.history.write("send", uid=uid, ticket=ticket, expect=expect, amount=amount, r=r, t0=t0, t1=t1)

    def _run(self) -> None:
        due_s = time.monotonic()
        while not self._ending.is_set():
            due_s += self._rng.expovariate(self.load.rate)
            self._ending.wait(max(0.0, due_s - time.monotonic()))
            self._one()

    def _one(self) -> None:
        load, rng = self.load, self._rng
        ticket = f"T{rng.choices(range(load.tickets), cum_weights=self._weights)[0]}"
        fields = {"work_ms": f"{min(load.work_ms * 10, rng.lognormvariate(0, 0.6) * load.work_ms):.2f}"}
        expect = "either" if load.talks else "effect"
        kind = rng.random()
        for part, name, value in (
            (load.poison, "fail", "always"),
            (load.fail_before, "fail", f"before:{rng.choice((1, 1, 2))}"),
            (load.fail_after, "fail", "after:1"),
            (load.abort, "abort", "1"),
            (load.die_again, "die_again_ms", str(load.die_again_ms)),
        ):
            if kind < part:
                fields[name] = value
                expect = "dlq" if value == "always" and not load.talks else expect
                break
            kind -= part
        uid = self.send(ticket, expect, **fields)
        if rng.random() < load.double_sends:
            self._add(uid, ticket, expect, {"amount": uid[1:], **fields})

    def _add(self, uid: str, ticket: str, expect: str, fields: Mapping[str, str]) -> None:
        flat = [part for pair in fields.items() for part in pair]
        streams = self.load.streams
        stream = streams[int(uid[1:]) * 7919 % len(streams)]
        sent_uid, sent_ticket = uid, ticket
        uid = self.load.told(stream, uid)
        ticket = self.load.told(stream, ticket)
        t0 = now_ns()
        with self._lock:
            try:
                mid = self._wire.call("XADD", stream, "*", "ticket_id", sent_ticket, "uid", sent_uid, *flat)
                self.mids[mid.decode()] = uid
                answer = "ok"
            except Refused:
                answer = "fail"
            except Unknown:
                answer = "info"
            t1 = now_ns()
            if answer == "ok":
                self.accepted[uid] = t1
        self.history.write(
            "send", uid=uid, ticket=ticket, expect=expect, amount=int(fields["amount"]), r=answer, t0=t0, t1=t1
        )


class Tail:
    """Notes every entry of the streams, by a plain XREAD."""

    def __init__(self, port: int, history: HistoryWriter, load: Load) -> None:
        self._wire = Wire(port)
        self._history = history
        self._load = load
        self._last = dict.fromkeys(load.streams, b"0-0")
        self._seen: set[tuple[str, bytes]] = set()
        self.uids: dict[str, str] = {}  # by stream id
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tail", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def finish(self) -> None:
        """End, after everything that is in the stream now was noted."""
        self._ending.set()
        if self._thread.ident is not None:
            self._thread.join(10)
        self._last = dict.fromkeys(self._last, b"0-0")
        with contextlib.suppress(Refused, Unknown):
            while self._read(None):
                pass
        self._wire.close()

    def _run(self) -> None:
        while not self._ending.is_set():
            try:
                self._read(100)
            except (Refused, Unknown):
                self._ending.wait(0.02)

    def _read(self, block_ms: int | None) -> bool:
        block = () if block_ms is None else ("BLOCK", block_ms)
        places = (*self._last, *self._last.values())
        reply = self._wire.call(
            "XREAD", "COUNT", 1000, *block, "STREAMS", *places, block_s=None if block_ms is None else 3.0
        )
        for key, entries in reply or ():
            stream = key.decode()
            for entry_id, flat in entries:
                self._last[stream] = entry_id
                if (stream, entry_id) not in self._seen:
                    self._seen.add((stream, entry_id))
                    self._note(stream, entry_id, flat)
        return bool(reply)

    def _note(self, stream: str, entry_id: bytes, flat: list[bytes]) -> None:
        mid = entry_id.decode()
        uid = _first(flat, _UID)
        ticket = (_first(flat, _TICKET) or b"")[:300].decode(errors="replace")
        self.uids[mid] = mid if uid is None else self._load.told(stream, uid.decode(errors="replace"))
        self._history.write("stream", mid=mid, uid=self.uids[mid], ticket=self._load.told(stream, ticket), t=now_ns())


def _first(flat: list[bytes], name: bytes) -> bytes | None:
    return next((flat[at + 1] for at in range(0, len(flat), 2) if flat[at] == name), None)
