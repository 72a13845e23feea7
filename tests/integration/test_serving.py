"""``usher.common.http.serve``: real arbiters and workers as processes of their own, real signals, real HTTP."""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
from flask import request

from benchmarks.measure.strangers import KINDS, Strangers, ask
from tests.doors import doorman
from tests.nightly import more
from tests.served import Running, until
from usher.common.base.errors import StartRefused, UsherError
from usher.common.base.log import configure, event
from usher.common.http import serve as serving
from usher.common.http.app import add_health, create_app
from usher.common.http.serve import Liveness, WorkerEnds, server_tls
from usher.common.runtime import fork_guard
from usher.common.runtime.service import Health

_CHILD = "from tests.integration.test_serving import child; child()"

log = logging.getLogger("child")


# -- the program that is served, in a process of its own


class Program:
    def __init__(self, how: dict[str, Any], ends: WorkerEnds) -> None:
        event("make", is_from_outside=ends.is_from_outside)
        time.sleep(how.get("make_s", 0.0))
        if how.get("make") == "refuse":
            raise UsherError("USHER_HANDLER: there is no such function")
        if how.get("make") == "crash":
            raise KeyError("the make of the test")
        self._how = how
        self._stalled = ""
        self.app = create_app(__name__, doorman(), 10_000)
        add_health(self.app, lambda: Health(()), dict)
        self.app.add_url_rule("/", "who", lambda: {"pid": os.getpid()})
        self.app.add_url_rule("/large", "large", lambda: "x" * 100_000)
        self.app.add_url_rule("/slow", "slow", lambda: (time.sleep(how.get("slow_s", 0.5)), {})[1])
        self.app.add_url_rule(
            "/read", "read", lambda: {"length": len(request.environ["wsgi.input"].read())}, methods=["POST"]
        )
        self.app.add_url_rule("/form", "form", lambda: dict(request.form), methods=["POST"])
        self.app.add_url_rule("/refuse", "refuse", lambda: ("", 413, {"Connection": "close"}), methods=["POST"])
        self.app.add_url_rule("/leave", "leave", _leave)
        self.app.add_url_rule("/freeze", "freeze", _freeze)
        self.app.add_url_rule("/stall", "stall", self._stall)

    def start(self, port: int, host: str) -> None:
        event("start", port=port, host=host)
        if self._how.get("start") == "refuse":
            raise UsherError("USHER_STATE_DIR: it cannot be used")
        if self._how.get("start") == "leave":
            serving.leave()
        if "stall_s" in self._how:  # gunicorn's loop is on the main thread, which is the one that runs this
            signal.signal(signal.SIGUSR1, lambda *_: time.sleep(self._how["stall_s"]))

    def liveness(self) -> Liveness:
        return Liveness(self._how.get("silence_s", 60.0), self._stalled)

    def stop(self) -> None:
        event("stop", thread=threading.current_thread().name)
        if "stall_s" in self._how:
            time.sleep(0.2)  # the loop has begun this drain, and waits for something to do
            os.kill(os.getpid(), signal.SIGUSR1)
        reader, writer = os.pipe()
        copies = [os.dup(writer) for _ in range(64)]  # connections of the drain: they get the numbers that are free
        time.sleep(self._how.get("stop_s", 0.0))
        event("heard", on=len(copies), what=select.select([reader], [], [], 0)[0] != [])
        if self._how.get("stop") == "raise":
            raise KeyError("the stop of the test")
        event("stopped")

    def _stall(self) -> dict[str, Any]:
        self._stalled = "guard made no progress for 20.0 s"
        return {}


def _freeze() -> dict[str, Any]:
    ctypes.PyDLL(None).sleep(60)  # keeps the interpreter lock, as a library may
    return {}


def _leave() -> dict[str, Any]:
    threading.Thread(target=serving.leave).start()
    return {}


def child() -> None:
    how = json.loads(sys.argv[1])
    configure("child", how.get("log_level", "info"), "json")
    serving.START_S = how.get("start_s", serving.START_S)
    serving._CLIENT_S = how.get("client_s", serving._CLIENT_S)
    tls = server_tls(Path(how["cert"]), Path(how["key"])) if "cert" in how else None
    ends = WorkerEnds(lambda: ["T 1-0"])
    if "oom" in how:
        fork_guard._COUNTS = Path(how["oom"])
    try:
        serving.serve(
            lambda: Program(how, ends),
            how.get("bind", "127.0.0.1:0"),
            "child",
            how.get("graceful_s", 10.0),
            tls=tls,
            ends=ends,
        )
    except StartRefused as refused:
        event("refused", says=str(refused))
        sys.exit(2)
    finally:
        event("unwound", pid=os.getpid())


# -- the tests


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    with ExitStack() as clean_up:

        def begin(**how: Any) -> Running:
            running = Running(tmp_path, how, _CHILD)
            clean_up.callback(running.kill)
            return running

        yield begin


def test_the_program_starts_after_the_fork_with_the_real_port_and_one_clean_line(start: Callable[..., Running]) -> None:
    running = start().wait_until_up()
    assert running.get().json() == {"pid": running.worker}
    assert running.worker != running.process.pid
    assert running.records("listening")[0]["url"] == f"http://127.0.0.1:{running.port}"
    assert len(running.text().splitlines()) == 3  # our own "make" and "start", and "listening": nothing of gunicorn


@pytest.mark.parametrize("number", [signal.SIGTERM, *more(signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)])
def test_every_ending_signal_drains_once_and_ends_with_0(start: Callable[..., Running], number: int) -> None:
    running = start(stop_s=0.3).wait_until_up()
    running.signal(number)
    assert running.ended() == 0
    assert len(running.records("stop")) == len(running.records("stopped")) == 1


def test_ctrl_c_reaches_both_processes_and_drains_once(start: Callable[..., Running]) -> None:
    running = start(stop_s=0.5).wait_until_up()
    os.killpg(running.process.pid, signal.SIGINT)
    assert running.ended() == 0
    assert len(running.records("stop")) == len(running.records("stopped")) == 1


def test_a_second_ctrl_c_shortens_the_drain(start: Callable[..., Running]) -> None:
    running = start(stop_s=60, graceful_s=60).wait_until_up()
    os.killpg(running.process.pid, signal.SIGINT)
    running.wait_for("stop")
    time.sleep(0.5)  # the arbiter must have seen the first one
    began = time.monotonic()
    os.killpg(running.process.pid, signal.SIGINT)
    running.ended()
    assert time.monotonic() - began < 8
    assert not running.records("stopped")
    assert len(running.records("drain_cut_short")) == 1


def test_a_signal_while_the_program_starts_is_not_lost(start: Callable[..., Running]) -> None:
    running = start(make_s=0.5)
    running.wait_for("make")
    running.signal(signal.SIGTERM)
    assert running.ended() == 0
    assert len(running.records("start")) == len(running.records("stopped")) == 1


def test_the_frames_of_the_parent_unwind_once(start: Callable[..., Running]) -> None:
    running = start().wait_until_up()
    running.signal(signal.SIGTERM)
    running.ended()
    assert [record["pid"] for record in running.records("unwound")] == [running.process.pid]


def _keep_alive(running: Running) -> socket.socket:
    connection = running.connect()
    connection.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    assert b"keep-alive" in _received(connection, b"}\n")
    return connection


def _received(connection: socket.socket, until: bytes) -> bytes:
    """All that comes up to ``until``: head and body of an answer are sent apart, and may arrive so."""
    answered = b""
    while until not in answered and (received := connection.recv(4096)):
        answered += received
    return answered


def _silent(running: Running) -> socket.socket:
    return running.connect()


def _half_a_request(running: Running) -> socket.socket:
    connection = running.connect()
    connection.sendall(b"GET / HTTP/1.1\r\nHost:")
    time.sleep(0.2)  # let a thread begin to read it
    return connection


@pytest.mark.parametrize("connect", [*more(None, _keep_alive, _silent), _half_a_request])
def test_open_connections_neither_delay_the_drain_nor_hold_up_the_end(
    start: Callable[..., Running], connect: Callable[[Running], socket.socket] | None
) -> None:
    running = start().wait_until_up()
    with ExitStack() as connections:
        if connect:
            connections.enter_context(closing(connect(running)))
        sent = running.signal(signal.SIGTERM)
        assert running.ended() == 0
        took = time.time() - sent
    delay_s = running.records("stop")[0]["time_ms"] / 1000 - sent
    log.warning("from SIGTERM to stop: %.0f ms, to the end: %.0f ms", delay_s * 1000, took * 1000)
    assert delay_s < 1
    assert took < 4  # the half request gets a second to arrive


def test_http_answers_while_the_drain_runs_and_says_close(start: Callable[..., Running]) -> None:
    running = start(stop_s=1.5).wait_until_up()
    with closing(_keep_alive(running)) as connection:
        running.signal(signal.SIGTERM)
        running.wait_for("stop")
        connection.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        assert b"Connection: close" in _received(connection, b"}\n")
    answered = running.get()
    assert answered.status_code == 200
    assert not running.records("stopped")
    assert running.ended() == 0


def test_a_request_that_is_being_answered_at_the_end_gets_its_answer(start: Callable[..., Running]) -> None:
    running = start().wait_until_up()
    with closing(running.connect()) as connection:
        connection.sendall(b"GET /slow HTTP/1.1\r\nHost: a\r\n\r\n")
        time.sleep(0.1)
        running.signal(signal.SIGTERM)
        assert _received(connection, b"{}\n").startswith(b"HTTP/1.1 200")
    assert running.ended() == 0


def test_a_request_that_comes_at_the_very_end_gets_its_answer(start: Callable[..., Running]) -> None:
    """The loop finds both at once: that idle connections are to be closed, and a request on one of them."""
    running = start(stall_s=1.0, stop_s=0.2).wait_until_up()
    with closing(_keep_alive(running)) as connection:
        running.signal(signal.SIGTERM)
        running.wait_for("stopped")
        time.sleep(0.1)
        connection.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        assert b"Connection: close" in _received(connection, b"}\n")
    assert running.ended() == 0
    assert not running.records("web_server")


def test_a_drain_that_hangs_is_ended_by_the_arbiter(start: Callable[..., Running]) -> None:
    running = start(stop_s=60, graceful_s=1).wait_until_up()
    began = time.monotonic()
    running.signal(signal.SIGTERM)
    running.ended()
    assert 1 <= time.monotonic() - began < 10


def test_a_stop_that_raises_is_logged_and_ends_all_the_same(start: Callable[..., Running]) -> None:
    running = start(stop="raise").wait_until_up()
    running.signal(signal.SIGTERM)
    assert running.ended() == 0
    assert len(running.records("stop")) == 1
    assert "KeyError" in running.records("service_retrying")[0]["problem"]


def test_a_killed_worker_is_replaced_on_the_same_port(start: Callable[..., Running]) -> None:
    running = start().wait_until_up()
    port, first = running.port, running.worker
    os.kill(first, signal.SIGKILL)
    running.wait_until_up(2)
    assert running.worker != first
    assert {record["port"] for record in running.records("start")} == {port}
    assert running.get().json() == {"pid": running.worker}


@pytest.mark.parametrize(
    ("number", "kills", "is_from_outside"),
    [(signal.SIGKILL, 3, True), (signal.SIGKILL, 4, False), (signal.SIGKILL, None, False), (signal.SIGSEGV, 3, False)],
    ids=["killed", "out of memory", "not known", "crashed"],
)
def test_a_worker_knows_whether_the_last_one_was_ended_from_outside(
    start: Callable[..., Running], tmp_path: Path, number: int, kills: int | None, is_from_outside: bool
) -> None:
    counts = tmp_path / "vmstat"
    counts.write_text("" if kills is None else "pgfault 1\noom_kill 3\n")
    running = start(oom=str(counts)).wait_until_up()
    counts.write_text("" if kills is None else f"pgfault 1\noom_kill {kills}\n")
    os.kill(running.worker, number)
    running.wait_until_up(2)
    assert [made["is_from_outside"] for made in running.records("make")] == [False, is_from_outside]
    os.kill(running.worker, signal.SIGSEGV)
    running.wait_until_up(3)
    assert running.records("make")[2]["is_from_outside"] is False, "that was the end before the last"


def test_a_worker_outlives_its_arbiter_only_for_the_drain_and_frees_the_port(start: Callable[..., Running]) -> None:
    running = start(stop_s=1.0).wait_until_up()
    with closing(_keep_alive(running)):
        killed = running.signal(signal.SIGKILL)
        running.wait_for("stopped")
        noticed_s = running.records("stop")[0]["time_ms"] / 1000 - killed
        assert noticed_s < 5, "gunicorn looks every second; then HTTP ends first, for a successor needs the port"
        running.ended()
    serving.check_address(f"127.0.0.1:{running.port}", "USHER_BIND")


def test_an_answer_that_is_late_wakes_nobody_through_a_descriptor_of_the_drain(start: Callable[..., Running]) -> None:
    running = start(slow_s=3.0, stop_s=4.0).wait_until_up()
    with closing(socket.create_connection(("127.0.0.1", running.port))) as client:
        client.sendall(b"GET /slow HTTP/1.1\r\nHost: localhost\r\n\r\n")
        running.signal(signal.SIGKILL)
        running.wait_for("stopped")
    assert [record["what"] for record in running.records("heard")] == [False]


def test_an_orphan_whose_drain_hangs_ends_by_itself(start: Callable[..., Running]) -> None:
    running = start(stop_s=60, graceful_s=1).wait_until_up()
    running.signal(signal.SIGKILL)
    running.ended()
    assert running.records("drain_unfinished")


def test_a_signal_that_ends_an_orphan_at_its_end_unwinds_no_frame_of_its_parent(start: Callable[..., Running]) -> None:
    running = start(stop_s=60, graceful_s=30).wait_until_up()
    worker = running.worker
    running.signal(signal.SIGKILL)
    running.wait_for("arbiter_gone")
    os.kill(worker, signal.SIGABRT)
    running.ended()
    assert not running.records("unwound")


@pytest.mark.parametrize("how", ["/freeze", "/stall"])
def test_a_worker_that_stands_still_is_ended_by_its_arbiter_which_says_so(
    start: Callable[..., Running], how: str
) -> None:
    running = start(silence_s=2.5).wait_until_up()
    first = running.worker
    with contextlib.suppress(requests.RequestException):
        running.get(how)
    running.wait_until_up(2)
    assert running.get().json() == {"pid": running.worker}
    assert running.worker != first
    [told] = running.records("worker_stood_still")
    assert (told["program"], told["pid"], told["did"], told["running"]) == ("child", first, "runs", ["T 1-0"])
    assert [one["why"] for one in running.records("services_stand_still")] == (
        ["guard made no progress for 20.0 s"] if how == "/stall" else []
    )
    assert not running.records("web_server"), "what gunicorn says of it is less, and may be wrong (no memory?)"
    assert ("_freeze" in running.text()) == (how == "/freeze"), "where its threads stood"


def test_a_start_that_makes_no_progress_is_ended_and_told(start: Callable[..., Running]) -> None:
    running = start(make_s=60, start_s=1.0)
    told = running.wait_for("worker_stood_still")
    assert (told["program"], told["did"]) == ("child", "starts")
    running.wait_for("make", 2)


def test_a_worker_that_was_stopped_together_with_its_arbiter_goes_on(start: Callable[..., Running]) -> None:
    running = start(silence_s=2.5).wait_until_up()
    worker = running.worker
    os.killpg(running.process.pid, signal.SIGSTOP)
    time.sleep(5)
    running.process.send_signal(signal.SIGCONT)  # the arbiter first
    time.sleep(0.1)
    os.kill(worker, signal.SIGCONT)
    time.sleep(2)
    assert running.get().json() == {"pid": worker}


def test_leave_brings_a_fresh_worker(start: Callable[..., Running]) -> None:
    running = start().wait_until_up()
    first = running.worker
    # The connection ends wherever the process was: before the answer, or in the middle of it.
    with pytest.raises((requests.ConnectionError, requests.exceptions.ChunkedEncodingError)):
        for _ in range(100):
            running.get("/leave")
    running.wait_until_up(2)
    assert running.worker != first
    assert running.records("worker_leaves")[0]["code"] == os.EX_TEMPFAIL
    assert not running.records("stop")


def test_a_worker_that_always_leaves_at_once_is_not_started_all_the_time(start: Callable[..., Running]) -> None:
    running = start(start="leave")
    running.wait_for("start", 2)
    time.sleep(3)
    assert 3 <= len(running.records("start")) <= 10
    running.signal(signal.SIGTERM)
    assert running.ended() == 0


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"make": "refuse"}, "USHER_HANDLER: there is no such function"),
        ({"start": "refuse"}, "USHER_STATE_DIR: it cannot be used"),
        ({"make": "crash"}, "the child failed while it started; the lines above say why"),
    ],
)
def test_a_program_that_cannot_start_is_refused_with_its_own_words(
    start: Callable[..., Running], how: dict[str, str], says: str
) -> None:
    running = start(**how)
    assert running.ended() == 2
    assert [record["says"] for record in running.records("refused")] == [says]
    troubles = running.records("web_server")
    assert len(troubles) == (1 if how.get("make") == "crash" else 0)
    assert all("the make of the test" in record["traceback"] for record in troubles)


def test_there_is_exactly_one_worker_whatever_signals_come(start: Callable[..., Running]) -> None:
    running = start().wait_until_up()
    for number in (signal.SIGTTIN, signal.SIGTTOU, signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH):
        running.signal(number)
        os.kill(running.worker, number if number != signal.SIGTTIN and number != signal.SIGTTOU else signal.SIGUSR1)
    time.sleep(1.5)
    assert [found.pid for found in psutil.Process(running.process.pid).children()] == [running.worker]
    assert running.get().status_code == 200
    assert len(running.records("start")) == 1


def test_an_address_in_use_is_named_with_its_setting(start: Callable[..., Running]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        bind = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(StartRefused, match=f"^USHER_BIND: {bind} is in use"):
            serving.check_address(bind, "USHER_BIND")
        running = start(bind=bind)
        assert running.ended() == 2
        assert running.records("refused")[0]["says"].startswith(f"USHER_BIND: {bind} is in use")
        assert not running.records("web_server")


@pytest.mark.parametrize("bind", ["127.0.0.1:0", "localhost:0", "[::1]:0", "0.0.0.0:0"])
def test_port_0_is_always_free(bind: str) -> None:
    serving.check_address(bind, "USHER_BIND")


@pytest.mark.parametrize(
    ("bind", "says"),
    [
        ("192.0.2.1:0", "is not an address of this machine"),
        ("no-such-host.invalid:0", "the host of .* cannot be found"),
    ],
)
def test_an_address_that_is_not_ours_is_refused(bind: str, says: str) -> None:
    with pytest.raises(StartRefused, match=f"^USHER_BIND: .*{says}"):
        serving.check_address(bind, "USHER_BIND")


# -- connections


@pytest.mark.parametrize("before", [*more(b""), b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"], ids=["new", "kept"])
def test_dozens_of_half_heads_delay_nobody(start: Callable[..., Running], before: bytes) -> None:
    running = start().wait_until_up()
    with ExitStack() as connections:
        opened = [connections.enter_context(closing(running.connect())) for _ in range(40)]
        for connection in opened:
            connection.sendall(before)
            assert not before or _received(connection, b"}\n")
            connection.sendall(b"GET / HTTP/1.1\r\nHo")
        time.sleep(0.1)
        began = time.monotonic()
        assert running.get().status_code == 200
        assert time.monotonic() - began < 2
        for rest in (b"st: a\r\n\r\n", b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"):
            opened[0].sendall(rest)
            assert _received(opened[0], b"}\n").startswith(b"HTTP/1.1 200")


def test_clients_that_do_not_close_their_end_do_not_stop_the_loop(start: Callable[..., Running]) -> None:
    running = start().wait_until_up()
    with ExitStack() as connections:
        for _ in range(40):
            connection = connections.enter_context(closing(running.connect()))
            connection.sendall(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        time.sleep(0.1)
        began = time.monotonic()
        assert running.get().status_code == 200
        assert time.monotonic() - began < 0.8, "nor its threads"
        time.sleep(1.5)  # they were waited for long enough
        began = time.monotonic()
        assert running.get().status_code == 200
        assert time.monotonic() - began < 0.8


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        pytest.param(b"GET / HTTP/1.1\r\nHost:", b"", id="head"),
        pytest.param(b"POST /read HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\nab", b"", id="body"),
    ],
)
def test_a_client_that_falls_silent_is_waited_for_a_while(
    start: Callable[..., Running], sent: bytes, answer: bytes
) -> None:
    running = start(client_s=1).wait_until_up()
    with closing(running.connect()) as connection:
        connection.sendall(sent)
        began = time.monotonic()
        assert connection.recv(4096).startswith(answer)
        assert 0.5 < time.monotonic() - began < 5
    assert not running.records("web_server")


@pytest.mark.parametrize("kind", more(*KINDS))
def test_health_is_answered_while_strangers_hold_more_connections_than_there_are_threads(
    start: Callable[..., Running], kind: str, count: int = 900
) -> None:
    running = start().wait_until_up()
    address = ("127.0.0.1", running.port)
    strangers = Strangers(address, kind, count)
    strangers.start()
    try:
        until(lambda: strangers.made >= count and ask(address, time.monotonic()), "all of them are there", running)
        took_s = sorted(ask(address, time.monotonic()) for _ in range(20))
    finally:
        strangers.stop()
    assert took_s[-2] < 0.5
    assert running.get().status_code == 200, "nor does anybody else wait"


@pytest.mark.parametrize("kind", ["heads", "behind"])
def test_health_is_answered_while_there_are_more_halves_than_threads(start: Callable[..., Running], kind: str) -> None:
    test_health_is_answered_while_strangers_hold_more_connections_than_there_are_threads(start, kind, 400)


def test_who_sends_one_request_behind_another_is_not_answered(start: Callable[..., Running]) -> None:
    with closing(start(client_s=1).wait_until_up().connect()) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\nGET / HT")
        assert connection.recv(4096).startswith(b"HTTP/1.1 408")


def test_continue_is_said(start: Callable[..., Running]) -> None:
    running = start().wait_until_up()
    head = b"POST %s HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n"
    with closing(running.connect()) as connection:
        connection.sendall(head % b"/read")
        assert _received(connection, b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(b"abc")
        connection.shutdown(socket.SHUT_WR)
        assert connection.makefile("rb").read().endswith(b'{"length":3}\n')
    with closing(running.connect()) as connection:
        connection.sendall(head % b"/refuse" + b"abc")
        answered = _received(connection, b"Content-Type").removeprefix(
            b"HTTP/1.1 100 Continue\r\n\r\n"
        )  # gunicorn asks for every body
        assert answered.startswith(b"HTTP/1.1 413")
        assert b"Connection: close" in answered
