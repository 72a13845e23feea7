"""Connections that stay open: one thread for all of them, and nobody waits for one who does not read."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from tests.abuse import check_contract
from tests.integration.routers import PATIENCE_S, until
from usher.common.http.server import push_sockets as live_sockets
from usher.common.http.server.push_sockets import LiveSockets


@pytest.fixture
def sockets() -> Iterator[LiveSockets]:
    made = LiveSockets(500)
    made.start()
    yield made
    made.stop()
    assert made.join(PATIENCE_S)


def pair() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair()
    theirs.settimeout(PATIENCE_S)
    return ours, theirs


def read(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = sock.recv(65_536)
        assert more, data
        data += more
    return data


def test_it_can_be_started_and_stopped_as_any_service() -> None:
    check_contract(lambda: LiveSockets(10))


def test_hundreds_of_connections_need_no_thread_of_their_own(sockets: LiveSockets) -> None:
    threads = threading.active_count()
    pairs = [pair() for _ in range(300)]
    lives = [sockets.keep(ours, "", lambda: None) for ours, _ in pairs]
    for number, live in enumerate(lives):
        live.send(b"%03d" % number)
    assert [read(theirs, 3) for _, theirs in pairs] == [b"%03d" % number for number in range(300)]
    assert threading.active_count() == threads
    assert sockets.count == 300
    for _, theirs in pairs:
        theirs.close()
    until(lambda: sockets.count == 0)


def test_who_leaves_is_noticed_and_reported_once(sockets: LiveSockets) -> None:
    left: list[int] = []
    ours, theirs = pair()
    live = sockets.keep(ours, "", lambda: left.append(1))
    live.send(b"x")
    assert read(theirs, 1) == b"x"
    theirs.close()
    until(lambda: bool(left))
    live.send(b"more")
    live.close()
    until(lambda: live.closed and sockets.count == 0)
    assert left == [1]


def test_who_does_not_read_loses_the_connection_and_the_others_do_not_wait(sockets: LiveSockets) -> None:
    gone: list[int] = []
    deaf, deaf_side = pair()
    ours, theirs = pair()
    silent = sockets.keep(deaf, "", lambda: gone.append(1))
    other = sockets.keep(ours, "", lambda: None)
    for _ in range(100):
        silent.send(b"x" * 65_536)
    other.send(b"hello")
    assert read(theirs, 5) == b"hello"
    until(lambda: bool(gone))
    assert sockets.slow == 1
    deaf_side.close()
    theirs.close()


def test_more_than_a_socket_takes_at_once_comes_whole(sockets: LiveSockets) -> None:
    ours, theirs = pair()
    live = sockets.keep(ours, "", lambda: None)
    data = bytes(range(256)) * 1000
    live.send(data[:200_000])
    assert read(theirs, 200_000) == data[:200_000]
    live.send(data[200_000:])
    assert read(theirs, 56_000) == data[200_000:]
    theirs.close()


def test_one_event_may_be_larger_than_what_may_wait(sockets: LiveSockets) -> None:
    ours, theirs = pair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 43_520)  # as a connection over a network begins
    live = sockets.keep(ours, "", lambda: None)
    data = bytes(range(256)) * 4000
    live.send(data)
    live.send(b"more")
    assert read(theirs, len(data) + 4) == data + b"more"
    assert sockets.slow == 0
    theirs.close()


def test_the_end_closes_all_of_them() -> None:
    sockets = LiveSockets(10)
    sockets.start()
    ours, theirs = pair()
    sockets.keep(ours, "", lambda: None).send(b"bye")
    assert read(theirs, 3) == b"bye"
    sockets.stop()
    assert sockets.join(PATIENCE_S)
    assert theirs.recv(10) == b""
    assert not sockets.has_room("")
    theirs.close()


def test_a_silent_connection_gets_a_sign_of_life(sockets: LiveSockets, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_sockets, "_HEARTBEAT_S", 0.1)
    ours, theirs = pair()
    sockets.keep(ours, "", lambda: None)
    assert read(theirs, 3).startswith(b":\n\n")
    theirs.close()


def test_there_is_room_for_so_many(sockets: LiveSockets) -> None:
    assert sockets.has_room("")
    small = LiveSockets(0)
    assert not small.has_room("")
    small.start()
    small.stop()
    assert small.join(PATIENCE_S)


def test_one_caller_leaves_half_of_the_room_to_others() -> None:
    """228 subscriptions of one viewer took all descriptors, and the master could not even ask Redis who leads."""
    sockets = LiveSockets(4)
    sockets.start()
    pairs = [pair() for _ in range(2)]
    lives = [sockets.keep(ours, "vera", lambda: None) for ours, _ in pairs]
    until(lambda: sockets.count == 2)
    assert [sockets.has_room(who) for who in ("vera", "otto", "")] == [False, True, True]
    lives[0].close()
    until(lambda: sockets.count == 1)
    assert sockets.has_room("vera")
    sockets.stop()
    assert sockets.join(PATIENCE_S)
    for _, theirs in pairs:
        theirs.close()


_FEW_FILES = """
import resource
from usher.common.http.server.open_files import within_open_files

resource.setrlimit(resource.RLIMIT_NOFILE, (256, 600))
print(within_open_files(64, 500), resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_where_fewer_files_may_be_open_than_are_wanted_a_half_is_left_for_the_rest_of_the_program() -> None:
    said = subprocess.run([sys.executable, "-c", _FEW_FILES], capture_output=True, text=True, timeout=30)
    assert said.stdout.strip() == "(64, 236) (600, 600)", said.stderr
