"""Users while messages run: they interrupt, clear, send up to a limit and beyond one, call and stream; and what they are told."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import requests

from tests.chaos.rig.producer import STREAM, Producer
from tests.chaos.rig.records import now_ns
from tests.chaos.rig.wire import Refused, Unknown, Wire, mapping
from usher import CallTimeout, Failed
from usher import Producer as Sender
from usher.common.base.errors import Behind, NotNow, UsherError
from usher.common.protocol.run_log import decode

LIMIT = 4
_CALLERS, _TIMEOUTS_S = 4, (4.0, 4.0, 0.05, 4.0, 0.5)
#: A reply stream that nobody reads: it has at the end all that was ever written to it.
_REPLIES = "{" + STREAM + "}:replies:" + "a" * 32


class Talk:
    """Threads, from ``start`` to ``stop``; ``note`` then writes down what Redis has of it."""

    def __init__(self, port: int, group: str, producer: Producer, counts: Counter[str], masters: list[str]) -> None:
        self._url, self._port, self._group = f"redis://127.0.0.1:{port}/0", port, group
        self._producer, self._counts, self._masters = producer, counts, masters
        self._ending, self._numbers = threading.Event(), itertools.count(1)
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        whats = (self._interrupt, self._clear, self._send_some, self._send_raw, self._send_beyond)
        whats += _CALLERS * (self._call,)
        self._threads = [threading.Thread(target=self._live, args=(what,), daemon=True) for what in whats]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(20)

    def _live(self, what: Callable[[Sender, Wire, str], float]) -> None:
        sender = Sender(
            self._url, STREAM, patience_s=1.0, ticket_limit=LIMIT * (what == self._send_some), group=self._group
        )
        wire, pause_s = Wire(self._port), 0.0
        while not self._ending.wait(pause_s):
            pause_s = what(sender, wire, f"T{next(self._numbers) % self._producer.load.tickets}")
        sender.close()
        wire.close()

    def _interrupt(self, sender: Sender, _: Wire, ticket: str) -> float:
        with contextlib.suppress(UsherError):
            self._counts["interrupts"] += sender.interrupt(ticket if next(self._numbers) % 4 else "L" + ticket)
        return 0.05

    def _clear(self, sender: Sender, _: Wire, ticket: str) -> float:
        self._post("clears", f"tickets/{ticket}/clear")
        return 0.15

    def _post(self, count: str, path: str, **told: Any) -> None:
        for url in self._masters:
            with contextlib.suppress(requests.RequestException):
                self._counts[count] += requests.post(f"{url}/api/{path}", json=told, timeout=2).ok
                break

    def _send_some(self, sender: Sender, _: Wire, ticket: str) -> float:
        for _ in range(LIMIT + 2):
            self._sent("limited", ticket, lambda fields: sender.send(ticket, fields))
        return 0.3

    def _send_beyond(self, _: Sender, wire: Wire, ticket: str) -> float:
        """More at once than a live rule lets wait of the ticket."""
        self._post("rules", "rules", target="pattern", value="L*", action="limit", ticket_limit=LIMIT)
        for _number in range(LIMIT + 3):
            self._send_raw(_, wire, "L" + ticket, "150")
        return 0.8

    def _sent(self, kind: str, ticket: str, send: Callable[[dict[str, str]], str], work_ms: str = "5") -> str:
        """Note what is sent. Return its uid."""
        uid, t0, mid, answer = f"{kind}{next(self._numbers)}", now_ns(), "", "ok"
        amount = int(uid.removeprefix(kind)) + 10**6
        try:
            mid = send({"uid": uid, "amount": str(amount), "work_ms": work_ms})
        except Behind:
            self._counts["behind"] += 1
            answer = "fail"
        except (NotNow, Refused):
            answer = "fail"
        except (UsherError, Unknown):
            answer = "info"
        self._producer.took(uid, ticket, "either", amount, answer if mid or answer != "ok" else "info", t0, mid)
        return uid

    def _send_raw(self, _: Sender, wire: Wire, ticket: str, work_ms: str = "5") -> float:
        self._sent("raw", ticket, lambda fields: str(wire.call(
            "XADD", STREAM, "*", "usher_reply", f"{_REPLIES} {int(fields['amount'])}", "ticket_id", ticket,
            *itertools.chain.from_iterable(fields.items())).decode()), work_ms)  # fmt: skip
        return 0.07

    def _call(self, sender: Sender, _: Wire, ticket: str) -> float:
        """One call, by stream, so that an id is known whatever becomes of it."""
        answers: Any = None

        def send(fields: dict[str, str]) -> str:
            nonlocal answers
            answers = sender.stream(ticket, fields, _TIMEOUTS_S[int(fields["amount"]) % len(_TIMEOUTS_S)])
            if not answers.id and not answers.came.empty() and isinstance(problem := answers.came.get(), Exception):
                raise problem
            return str(answers.id)

        uid, t0, outcome, told = self._sent("call", ticket, send), now_ns(), "answered", None
        if answers.id:
            try:
                parts = list(answers)
                told = answers.result
                self._counts["parts"] += len(parts)
            except Failed as failed:
                outcome, told = "failed", failed.reason
            except CallTimeout:
                outcome = "timed_out"
            except UsherError as problem:
                outcome, told = "broken", str(problem)
            self._counts[f"calls_{outcome}"] += 1
            self._producer.history.write("call", uid=uid, r=outcome, told=told, t0=t0, t1=now_ns())
        return 0.02 if answers.id else 0.2

    def note(self, prefix: str) -> None:
        """All answers of the stream that nobody reads, and the run log."""
        wire, write = Wire(self._port, 10.0), self._producer.history.write
        for _, flat in wire.call("XRANGE", _REPLIES, "-", "+"):
            told = {name.decode(): value.decode() for name, value in mapping(flat).items()}
            kind = "failed" if "failed" in told else "part" if "part" in told else "answered"
            value = told["failed"] if kind == "failed" else json.loads(told["json"])
            at = [int(number) for number in told.get("part", "").split()]
            write("answer", uid=f"raw{int(told['call']) - 10**6}", r=kind, told=value, at=at)
        for _, flat in wire.call("XRANGE", prefix + "runs", "-", "+"):
            for run in decode(mapping(flat)[b"batch"]):
                write("ran", mid=run.id, r=run.outcome, into=run.into, tok=run.fence, attempt=run.attempt)
        wire.close()
