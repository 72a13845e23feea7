"""What handlers do to the process that runs them: it goes on, tells the truth, and can be ended."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
from pathlib import Path

import pytest
import requests

from tests.hands import ask, group_of
from tests.nightly import more
from tests.outboxes import Outbox
from tests.process.crew import KEYS, Crew
from usher import Link

pytestmark = pytest.mark.process

_LOGS = """
import logging, os

log = logging.getLogger("shop")
text = "x" * int(os.environ.get("USHER_TEST_LINE", "10"))


def handle(message):
    log.warning("%s %s", message.id, text)
    exec(message.fields.get("does", ""), globals())
"""
FILES = {"logs.py": _LOGS}


def _send(link: Link, count: int, **fields: str) -> None:
    pairs = [word for pair in fields.items() for word in pair]
    link.pipeline([("XADD", KEYS.stream, "*", "ticket_id", f"T{number % 20}", *pairs) for number in range(count)])


def _is_done(link: Link, count: int) -> bool:
    """All were read, and acknowledged."""
    if not link.call("EXISTS", KEYS.stream):
        return False
    facts = group_of(link.call("XINFO", "GROUPS", KEYS.stream), KEYS.group, link.call("GET", KEYS.taken)) or {}
    return facts.get(b"pending") == 0 and facts[b"entries-read"] == count == link.call("XLEN", KEYS.stream)


def _url_of(crew: Crew, name: str) -> str:
    (row,) = [row for row in ask(f"{crew.masters[0]}/api/consumers").document["consumers"] if row["name"] == name]
    return str(row["health_url"]).removesuffix("/api/health")


def _dropped(url: str) -> float:
    page = requests.get(f"{url}/metrics", timeout=10).text
    found = re.search(r"^usher_log_lines_dropped_total (.*)$", page, re.MULTILINE)
    assert found is not None
    return float(found[1])


def test_a_log_that_nobody_reads_stops_nothing_and_what_is_missing_is_counted(folder: Path, link: Link) -> None:
    unread, pipe = os.pipe()
    with Crew(folder, link.url) as crew:
        crew.start(1, [])
        crew.start_consumer("c1", "logs:handle", stderr=pipe, USHER_TEST_LINE="10000")
        os.close(pipe)
        _send(link, 500)
        crew.until(lambda: _is_done(link, 500), 60, "all are handled")
        url = _url_of(crew, "c1")
        health = ask(f"{url}/api/health")
        assert (health.status, health.document["status"]) == (200, "ok")
        dropped = _dropped(url)
        assert 300 < dropped < 500, "1 MiB waits, and what the pipe holds"
        assert health.document["warnings"] == [f"nobody reads the log: {dropped:.0f} dropped"]
        assert not crew.events("consumer_lost")
        with os.fdopen(unread, "rb") as read:  # somebody reads again
            told: list[dict[str, object]] = []
            while not any(line["message"] == "log_lines_dropped" for line in told):
                told.append(json.loads(read.readline()))
            assert told[-1]["lines"] == dropped
            assert "consumer_starting" in [line["message"] for line in told], "the lines of before are all there"
            assert len([line for line in told if "xxx" in str(line["message"])]) == 500 - dropped
            _send(link, 3)
            crew.until(lambda: _is_done(link, 503), 20, "more are handled")
            assert ask(f"{url}/api/health").document["warnings"] == [f"the log lacks lines: {dropped:.0f} dropped"]
            assert crew.stop("c1") == 0
            assert b"consumer_drained" in read.read()


@pytest.mark.slow
def test_programs_whose_log_nobody_reads_from_their_first_line_on_work_and_end(
    folder: Path, link: Link, sqlite_outbox: Outbox
) -> None:
    unread, pipe = os.pipe()
    os.set_blocking(pipe, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(pipe, b"x" * 4096)
    os.set_blocking(pipe, True)
    ids = sqlite_outbox.stage_many(30)
    with Crew(folder, link.url) as crew:
        crew.start_master(stderr=pipe)
        crew.start_consumer("c1", "logs:handle", stderr=pipe)
        crew.run("streamer", "streamer", stderr=pipe, USHER_OUTBOX_URL=sqlite_outbox.url)
        os.close(pipe)
        crew.until(lambda: _is_done(link, len(ids)), 60, "what was staged is sent, handed over and handled")
        warning = ["nobody reads the log: 0 dropped"]
        for url in (crew.masters[0], _url_of(crew, "c1")):
            health = ask(f"{url}/api/health")
            assert (health.status, health.document["warnings"]) == (200, warning)
        assert [crew.stop(name) for name in ("streamer", "c1", "master-1")] == [0, 0, 0]
    os.close(unread)


@pytest.mark.slow
def test_a_consumer_whose_log_nobody_reads_leaves_when_its_lease_is_lost(folder: Path, link: Link) -> None:
    unread, pipe = os.pipe()
    with Crew(folder, link.url) as crew:
        crew.start(1, [])
        crew.start_consumer("c1", "logs:handle", stderr=pipe, USHER_TEST_LINE="10000")
        os.close(pipe)
        _send(link, 100)
        crew.until(lambda: _is_done(link, 100), 60, "all are handled")
        before = crew.worker_of("c1")
        _end_lease(link, "c1")
        crew.until(lambda: crew.worker_of("c1") != before, 20, "a successor comes")
        _send(link, 20)
        crew.until(lambda: _is_done(link, 120), 30, "it works")
        assert crew.stop("c1") == 0
    os.close(unread)


def _end_lease(link: Link, name: str) -> None:
    (lease,) = [key for key in link.call("KEYS", f"*lease*{name}*") if b"leader" not in key]
    link.call("DEL", lease)


@pytest.mark.parametrize(
    "does",
    [
        "import sys; sys.stderr = sys.stdout = None",
        *more(
            "import sys; sys.stderr.close()",
            "os.close(2)",
            "os.dup2(os.open('/dev/null', os.O_WRONLY), 2); os.dup2(2, 1)",
            "import sys; sys.stdout.close(); os.close(2)",
            "logging.getLogger().handlers[0].flush = None; logging.getLogger().handlers[0].close()",
        ),
        "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM]); logging.getLogger().handlers.clear()",
    ],
)
def test_a_handler_that_closes_its_output_is_seen_on_and_its_process_ends_when_it_must(
    folder: Path, link: Link, does: str
) -> None:
    with Crew(folder, link.url) as crew:
        crew.start(1, ["c1"], "logs:handle")
        _send(link, 1, does=does)
        crew.until(lambda: _is_done(link, 1), 20, "it is handled")
        before = crew.worker_of("c1")
        _end_lease(link, "c1")
        crew.until(lambda: crew.worker_of("c1") != before, 20, "its lease is lost: a successor comes")
        assert [line["pid"] for line in crew.events("worker_leaves", "c1")] == [before], "and the log says so"
        _send(link, 20)
        crew.until(lambda: _is_done(link, 21), 30, "that works")
        assert crew.stop("c1") == 0


_CONFIGURES = "import logging.config\nlogging.config.dictConfig({'version': 1})\n"


@pytest.mark.parametrize("place", ["at its import", pytest.param("when it runs", marks=pytest.mark.slow)])
def test_a_handler_that_sets_up_logging_anew_does_not_silence_what_usher_says(
    folder: Path, link: Link, place: str
) -> None:
    fails = f"{_CONFIGURES if place == 'when it runs' else ''}raise ValueError('no')"
    (folder / "logs.py").write_text((_CONFIGURES if place == "at its import" else "") + _LOGS)
    with Crew(folder, link.url) as crew:
        crew.start(1, ["c1"], "logs:handle", USHER_MAX_ATTEMPTS="1")
        _send(link, 1, does=fails)
        crew.until(lambda: crew.events("message_given_up", "c1"), 20, "the dead letter is told")
        (told,) = crew.events("message_given_up", "c1")
        assert (told["ticket"], told["error"]) == ("T0", "ValueError: no")
        assert len(crew.events("logging_replaced", "c1")) == 1
        assert crew.stop("c1") == 0
        assert crew.events("consumer_drained", "c1")


def test_a_wrong_logging_call_is_told_and_fails_no_handler(folder: Path, link: Link) -> None:
    with Crew(folder, link.url) as crew:
        crew.start(1, ["c1"], "logs:handle")
        _send(link, 1, does="log.info('%d apples', 'three'); log.warning('a', extra={'facts': 5})")
        crew.until(lambda: _is_done(link, 1), 20, "it is handled")
        assert not crew.events("handler_failed")
        (told,) = crew.events("log_line_unreadable", "c1")
        assert (told["said"], told["ticket"]) == ("'%d apples'", "T0")
        assert str(told["where"]).startswith("<string>:1")


#: State of the process that any code may set.
_STATE = (
    "import sys; sys.excepthook = sys.unraisablehook = lambda *_: 1 / 0",
    "import threading; threading.excepthook = lambda *_: 1 / 0",
    "import threading; threading.current_thread().name = None", "import socket; socket.setdefaulttimeout(0.001)",
    "import os; os.chdir('/')", "import os; os.umask(0o277)", "import os; os.environ.clear()",
    "import os; os.environ.update(http_proxy='http://127.0.0.1:1', TZ='Asia/Tokyo'); __import__('time').tzset()",
    "import locale; locale.setlocale(locale.LC_ALL, 'C')", "import warnings; warnings.simplefilter('error')",
    "import gc; gc.disable(); gc.set_threshold(1)", "import random; random.seed(1)", "import sys; sys.path.clear()",
    "import sys; sys.path_importer_cache.clear(); sys.meta_path.reverse()",
    "import decimal; decimal.setcontext(decimal.Context(prec=1, traps=list(decimal.Context().traps)))",
    "import asyncio; asyncio.set_event_loop_policy(asyncio.DefaultEventLoopPolicy()); asyncio.set_event_loop(None)",
    "import logging; logging.disable(logging.CRITICAL)",
    "import logging; logging.logThreads = logging.logProcesses = logging.raiseExceptions = False",
    "import logging; logging.setLogRecordFactory(lambda *_, **__: None)",
    "import logging; [logging.getLogger(name).setLevel(99) for name in list(logging.root.manager.loggerDict)]",
    "import logging; logging.getLogger('usher').propagate = False",
    "import logging; logging.basicConfig(force=True, stream=object())",
    "import faulthandler; faulthandler.enable(); faulthandler.dump_traceback_later(3600)",
    "import threading; threading.settrace(lambda *_: None); threading.setprofile(lambda *_: None)",
)  # fmt: skip
#: Only the main thread may do it, so a handler cannot.
_SIGNALS = (
    "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, list(signal.Signals)[:30])",
    "import signal; signal.signal(signal.SIGPIPE, signal.SIG_DFL)",
    "import signal; signal.signal(signal.SIGALRM, signal.SIG_IGN); signal.set_wakeup_fd(-1)",
    "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN); signal.siginterrupt(signal.SIGTERM, True)",
)


@pytest.mark.parametrize("kind", ["def", pytest.param("async def", marks=pytest.mark.slow)])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_consumer_works_on_and_drains_whatever_its_handlers_set(
    folder: Path, link: Link, kind: str, seed: int
) -> None:
    """Each of four consumers has some of it done at its import, and some by its first message."""
    rng = random.Random(seed)
    state = rng.sample(_STATE, len(_STATE))
    with Crew(folder, link.url) as crew:
        crew.start(1, [])
        for number in range(4):
            some = state[number::4]
            (folder / f"sets{number}.py").write_text(
                "\n".join(some[::2])
                + f"\n{_SIGNALS[number]}\nrest = [{', '.join(map(repr, some[1::2]))}]\n"
                + f"{kind} handle(message):\n    while rest:\n        exec(rest.pop())\n"
            )
            crew.start_consumer(f"c{number}", f"sets{number}:handle")
        crew.until(lambda: len(crew.events("consumer_registered")) == 4, 60, "they are registered")
        for count in range(200, 601, 200):
            _send(link, 200)
            crew.until(lambda count=count: _is_done(link, count), 40, "all are handled")  # type: ignore[misc]
        assert not crew.events("handler_failed")
        assert not crew.events("service_retrying", "c")
        assert not crew.events("worker_leaves")
        assert not crew.events("lease_revoked")
        for number in range(4):
            url = _url_of(crew, f"c{number}")
            assert ask(f"{url}/api/health").document["status"] == "ok"
            assert crew.stop(f"c{number}") == 0
            assert crew.events("consumer_drained", f"c{number}")
