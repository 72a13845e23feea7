"""Answers that go on: nobody waits for one who does not read."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator

import pytest
from flask import Flask

from usher.common.http import answers
from usher.common.http.answers import LiveStream, LiveStreams, Problem


@pytest.fixture
def streams() -> LiveStreams:
    return LiveStreams(4)


def frames(live: LiveStream) -> Iterator[bytes]:
    return live.response.iter_encoded()


def test_what_is_sent_is_read_and_then_it_is_told_that_nothing_waits(streams: LiveStreams) -> None:
    written: list[int] = []
    live = streams.open("", lambda: None, lambda: written.append(live.unwritten))
    read = frames(live)
    assert next(read) == b": following\n\n"
    live.send(b"a")
    live.send(b"b")
    assert live.unwritten == 2
    assert next(read) == b"ab"
    live.close()
    assert list(read) == []
    assert written == [0]


def test_the_end_is_told_once_and_makes_room(streams: LiveStreams) -> None:
    left: list[str] = []
    live = streams.open("", lambda: left.append("left"))
    assert len(streams._open) == 1
    for _ in range(2):
        live.response.close()
    assert (left, len(streams._open), live.closed) == (["left"], 0, True)


def test_who_does_not_read_loses_the_connection(streams: LiveStreams, caplog: pytest.LogCaptureFixture) -> None:
    live = streams.open("", lambda: None)
    read = frames(live)
    next(read)
    for _ in range(9):
        live.send(b"x" * 65_536)
    assert live.closed
    assert list(read) == []
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "reader_too_slow"
    ]


def test_one_event_may_be_larger_than_what_may_wait(streams: LiveStreams) -> None:
    live = streams.open("", lambda: None)
    read = frames(live)
    next(read)
    data = bytes(range(256)) * 4000
    live.send(data)
    live.send(b"more")
    assert next(read) == data + b"more"


def test_the_end_closes_all_of_them_after_what_was_sent(streams: LiveStreams) -> None:
    live = streams.open("", lambda: None)
    live.send(b"bye")
    streams.close()
    assert list(frames(live)) == [b": following\n\nbye"]
    with pytest.raises(Problem):
        streams.open("", lambda: None)


def test_a_silent_connection_gets_a_sign_of_life_and_who_leaves_is_noticed(
    streams: LiveStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "_LOOK_S", 0.02)
    monkeypatch.setattr(answers, "_HEARTBEAT_S", 0.1)
    ours, theirs = socket.socketpair()
    with Flask(__name__).test_request_context(environ_overrides={"gunicorn.socket": ours}):
        live = streams.open("", lambda: None)
    read = frames(live)
    assert [next(read), next(read)] == [b": following\n\n", b":\n\n"]
    theirs.close()
    assert list(read) == []
    ours.close()
