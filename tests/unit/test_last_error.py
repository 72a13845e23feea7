"""The last error of a message: the line of the handler's own code, what is kept of it, and who sees what."""

from __future__ import annotations

import json
import sysconfig
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest

from usher.common.protocol.attempts import CUT_OFF, NEVER, Attempts
from usher.common.protocol.last_error import LastError, decode, encode
from usher.consumer.execution.lanes import Lane
from usher.consumer.execution.watchdog import stacks
from usher.consumer.handlers.batches import TriedTogether
from usher.consumer.handlers.error_trace import own_line, traced
from usher.consumer.handlers.message import Message, OwnLease
from usher.master.policy.states import tried
from usher.master.web.api import without_texts

_PURELIB = sysconfig.get_paths()["purelib"]
_STDLIB = sysconfig.get_paths()["stdlib"]


def _call(path: str, line: int) -> str:
    return f'  File "{path}", line {line}, in f\n    f()\n'


def _line_of(raised: BaseException) -> str:
    name, line = own_line(traced(raised)).rsplit(":", 1)
    assert name.endswith("test_last_error.py")
    return Path(__file__).read_text().splitlines()[int(line) - 1].strip()


def test_the_line_is_the_innermost_one_of_the_handlers_own_code() -> None:
    try:
        json.loads("{")
    except ValueError as raised:
        assert _line_of(raised) == 'json.loads("{")'
    try:
        try:
            {}["x"]
        except KeyError as cause:
            raise RuntimeError("no") from cause
    except RuntimeError as raised:
        assert _line_of(raised) == 'raise RuntimeError("no") from cause'


def test_the_line_of_a_call_with_several_messages_is_that_of_its_error() -> None:
    try:
        {}["x"]
    except KeyError as raised:
        assert _line_of(TriedTogether(raised)) == '{}["x"]'


@pytest.mark.parametrize(
    ("calls", "line"),
    [
        ([("/srv/shop.py", 4), (f"{_PURELIB}/sqlalchemy/engine.py", 9)], "/srv/shop.py:4"),
        ([(f"{_PURELIB}/shop/orders.py", 4), (f"{_PURELIB}/sqlalchemy/engine.py", 9)], "shop/orders.py:4"),
        (
            [(f"{_PURELIB}/shop/orders.py", 4), (f"{_PURELIB}/shop/db.py", 7), (f"{_STDLIB}/json/x.py", 9)],
            "shop/db.py:7",
        ),
        ([(f"{_STDLIB}/json/x.py", 9), ("<frozen runpy>", 1)], ""),
        ([], ""),
    ],
)
def test_libraries_are_not_the_handlers_own_code_unless_it_is_installed_itself(
    calls: list[tuple[str, int]], line: str
) -> None:
    assert own_line("Traceback (most recent call last):\n" + "".join(_call(*call) for call in calls)) == line


def test_a_dump_of_a_process_that_hangs_begins_with_the_innermost_call() -> None:
    dump = 'Thread 0x1 (most recent call first):\n  File "/srv/a.py", line 3 in inner\n  File "/srv/b.py", line 4 in outer\n'
    assert own_line(dump) == "/srv/a.py:3"


def test_the_stack_of_a_handler_is_found_in_its_thread() -> None:
    from usher.consumer.execution.pools import LaneWorker

    message = Message(b"T", b"1-1", 1, [], OwnLease(1.0, 0.0))
    begun, over = threading.Event(), threading.Event()

    def handle(given: Message) -> None:
        begun.set()
        over.wait(30)

    class _Executor:
        lanes = Mock()

        def next_message(self, lane: object) -> Message:
            return message

        def admit(self, *_: object) -> bool:
            return True

        def succeeded(self, *_: object, here: bool = False) -> bool:
            return False

    worker = LaneWorker(0, _Executor(), handle)  # type: ignore[arg-type]
    running = threading.Thread(target=worker._run, args=(Lane(b"T"),))
    running.start()
    begun.wait(30)
    stack = stacks({})[b"1-1"]
    over.set()
    running.join()
    assert "in handle" in stack
    assert "_run" not in stack, "it begins with the handler"
    assert own_line(stack).rpartition(":")[0].endswith("test_last_error.py")
    assert not stacks({})


def test_what_is_kept_is_bounded_in_bytes_whatever_an_error_says() -> None:
    long = LastError("\x00é" * 10_000, "E" * 10_000, "a/" * 10_000, 2, 1, 3, 1000)
    kept = encode(long, "é" * 10_000)
    assert len(kept.head) <= 5_000
    assert len(kept.traceback) <= 3_010
    read = decode(kept.head)
    assert read is not None
    assert (read.starts, read.charged, read.most, read.at_ms) == (2, 1, 3, 1000)


@pytest.mark.parametrize("value", [None, b"", b"{", b"[]", b"null", b'{"error": 1}', b"\xff"])
def test_what_cannot_be_read_is_no_error(value: bytes | None) -> None:
    assert decode(value) is None


def test_attempts_are_told_with_the_error_of_the_last_start() -> None:
    error = LastError("KeyError: 'x'", "KeyError", "shop.py:4", 5, 3, 3, 1000)
    row = tried(Attempts(5, 3), error)
    assert (row["attempts"], row["charged"], row["max_attempts"]) == (5, 3, 3)
    assert row["last_error"]["told"] == "KeyError in shop.py:4"
    halted = tried(NEVER, error)  # its attempts are forgotten
    assert (halted["attempts"], halted["charged"]) == (5, 3)
    assert tried(Attempts(6, 3, 1), error)["last_error"]["told"] == CUT_OFF, "that start ended with its process"
    assert tried(Attempts(2, 2), None)["last_error"] is None, "a consumer of a former version notes none"


def test_viewers_see_types_and_places_of_errors_not_their_texts() -> None:
    row = tried(Attempts(1, 1), LastError("KeyError: 'bob'", "KeyError", "shop.py:4", 1, 1, 3))
    letter = {"error": "ValueError: bob", "error_type": "ValueError", "traceback": "bob", "reason": "gave_up"}
    seen = without_texts({"tickets": [row], "dead_letter": letter, "traceback": "bob"})
    assert "bob" not in json.dumps(seen)
    assert seen["tickets"][0]["last_error"]["told"] == "KeyError in shop.py:4"
    assert seen["dead_letter"]["error"] == "ValueError"
