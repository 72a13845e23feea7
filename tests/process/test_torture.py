"""``usher torture`` and its pytest fixture, on the examples and on handlers as users write them: real processes, a real
Redis, real faults."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.process.machine import ROOT, USHER, environ_for, processes_of, until
from tests.sinks import quick_folder

pytestmark = pytest.mark.process

_EXAMPLE = ("--effect", "examples.sinks:total", "--setup", "examples.sinks:create")
#: Handlers that keep a mapping in a file, under a lock; no database, so that they are quick.
_HANDLERS = """
import contextlib, fcntl, json, os, time
from usher.common.base.errors import RetryLater
from usher.common.redis.client import Link
from usher import batch
from usher.consumer.sinks.redis_guard import RedisGuard

@contextlib.contextmanager
def book():
    with open("book.json", "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        pages = json.loads(file.read() or "{}")
        yield pages
        text = json.dumps(pages)
        file.truncate(0)
        file.write(text)

def naive(message):
    with book() as pages:
        pages.setdefault(message.ticket_id, []).append(message.fields["amount"])

def fenced(message):
    with book() as pages:
        page = pages.setdefault("known", {}).setdefault(message.ticket_id, {"fence": 0, "uids": []})
        if message.fence < page["fence"] or message.uid in page["uids"]:
            return
        pages.setdefault(message.ticket_id, []).append(message.fields["amount"])
        page["fence"] = message.fence
        page["uids"].append(message.uid)

def merges(message):
    for one in (message, *message.absorb(1)):
        fenced(one)
    for one in message.absorb():
        fenced(one)

async def merges_and_waits(message):
    fenced(message)
    while one := await message.more(0):
        fenced(one)

def merges_under_its_own_uid(message):
    both = [message, *message.absorb()]
    with book() as pages:
        page = pages.setdefault("known", {}).setdefault(message.ticket_id, {"fence": 0, "uids": []})
        if message.fence < page["fence"] or message.uid in page["uids"]:
            return
        pages.setdefault(message.ticket_id, []).extend(one.fields["amount"] for one in both)
        page["fence"] = message.fence
        page["uids"].append(message.uid)

def keeps_the_newest(message):
    naive(next(reversed(message.absorb()), message))

@batch(most=5)
def fenced_batch(messages):
    failed = {}
    for message in messages:
        try:
            fenced(message)
        except Exception as problem:
            failed[message] = problem
    return failed

@batch()
async def naive_batch(messages):
    for message in messages:
        naive(message)

async def waits(message):
    fenced(message)

def forgets_to_wait(message):
    return waits(message)

def asks_first(message):
    with book() as pages:
        is_known = message.uid in pages.get("known", [])
    if is_known or not message.still_mine():
        return
    with book() as pages:
        pages.setdefault(message.ticket_id, []).append(message.fields["amount"])
    with book() as pages:
        pages.setdefault("known", []).append(message.uid)

def state(message):
    with book() as pages:
        pages[message.ticket_id] = message.fields["color"]

def pages(ticket):
    with book() as pages:
        return pages.get(ticket)

class Later(RetryLater):
    def __init__(self):
        pass

_FIRST = [RetryLater(-1), RetryLater(1e6), Later(), ValueError("\\udcff")]

def raises_anything(message):
    if message.attempt <= len(_FIRST):
        raise _FIRST[message.attempt - 1]
    fenced(message)

def breaks(message):
    raise ValueError("never works")

def hangs(message):
    open("hangs", "w").close()
    time.sleep(600)

def guarded(message):
    guard = RedisGuard(os.environ["USHER_REDIS_URL"])
    guard.apply(message, ("RPUSH", f"log:{message.ticket_id}", message.fields["amount"]))
    guard.close()

def log(ticket):
    link = Link(os.environ["USHER_REDIS_URL"], "shop")
    found = [value.decode() for value in link.call("LRANGE", f"log:{ticket}", 0, -1)]
    link.close()
    return found

def constant(ticket):
    return 1

def total(ticket):
    return sum(map(int, pages(ticket) or ()))
"""
FILES = {"shop.py": _HANDLERS}

_OWN_PID = """
def handle(message):
    assert os.getpid() == PID, "a connection made at the import would be shared by two processes"
    naive(message)
"""


def torture(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    with quick_folder() as fast:
        environ = environ_for(folder, EXAMPLE_DATABASE=f"sqlite:///{fast}/example.db", PYTHONPATH=str(ROOT))
        command = [*USHER, "torture", *words]
        return subprocess.run(
            command, env=environ, cwd=folder, capture_output=True, text=True, check=False, timeout=110
        )


def verdict(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(done.stdout)
    return {scenario["name"]: scenario for scenario in document["scenarios"]}


def test_the_sql_sink_is_safe(folder: Path) -> None:
    done = torture(folder, "examples.sinks:once", *_EXAMPLE, "--stops", "3", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["safe"] is True
    assert {name: scenario["runs"] for name, scenario in verdict(done).items() if scenario["runs"] > 1} == {
        "killed_within": 4,
        "failed_within": 4,
        "zombie_within": 4,
    }


def test_the_redis_guard_is_safe(folder: Path) -> None:
    done = torture(folder, "shop:guarded", "--effect", "shop:log", "--stops", "2", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["safe"] is True


def test_whatever_a_handler_raises_before_it_is_done_does_not_end_the_stage(folder: Path) -> None:
    done = torture(folder, "shop:raises_anything", "--effect", "shop:pages", "--stops", "1")
    assert (done.returncode, "SAFE: after each of" in done.stdout) == (0, True), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("handler", "code"), [pytest.param("fenced_batch", 0, marks=pytest.mark.slow), ("naive_batch", 1), ("waits", 0)]
)
def test_batch_and_async_handlers_are_called_as_a_consumer_calls_them(folder: Path, handler: str, code: int) -> None:
    done = torture(folder, f"shop:{handler}", "--effect", "shop:pages", "--stops", "1", "--json")
    assert done.returncode == code, done.stdout + done.stderr
    assert verdict(done)["sent_twice"]["safe"] is (code == 0)


@pytest.mark.parametrize(
    ("handler", "unsafe"),
    [
        ("merges", set()),
        pytest.param("merges_and_waits", set(), marks=pytest.mark.slow),
        ("merges_under_its_own_uid", {"merged_killed_within", "merged_failed_within"}),
        pytest.param("keeps_the_newest", {"merged"}, marks=pytest.mark.slow),
    ],
)
def test_what_a_run_absorbs_is_tried_as_well(folder: Path, handler: str, unsafe: set[str]) -> None:
    done = torture(folder, f"shop:{handler}", "--effect", "shop:pages", "--stops", "3", "--json")
    found = {name: one for name, one in verdict(done).items() if name.startswith("merged")}
    assert len(found) == 3, done.stdout + done.stderr
    assert {name for name, one in found.items() if not one["safe"]} >= unsafe
    assert done.returncode == bool(unsafe), done.stdout


def test_a_handler_of_which_nothing_runs_in_a_consumer_is_not_safe(folder: Path) -> None:
    done = torture(folder, "shop:forgets_to_wait", "--effect", "shop:pages", "--stops", "1")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "the handler returned 'coroutine', so nothing of the message was done" in done.stderr


def test_a_naive_counter_is_not_and_the_user_is_told_why(folder: Path) -> None:
    done = torture(folder, "examples.sinks:naive", *_EXAMPLE, "--stops", "1")
    assert done.returncode == 1, done.stdout + done.stderr
    text = " ".join(done.stdout.split())
    assert "NOT SAFE: effects went wrong in" in text
    assert "Expected 111, seen 121: 10 too much: your handler added message 2 twice." in text
    assert "Store message.uid in the same transaction as the effect" in text
    assert "Store message.fence with the effect and refuse a lower one" in text


@pytest.mark.slow
def test_asking_first_is_not_enough_and_the_place_is_named(folder: Path) -> None:
    done = torture(folder, "shop:asks_first", "--effect", "shop:pages", "--stops", "8", "--json")
    assert done.returncode == 1, done.stdout + done.stderr
    found = verdict(done)
    assert found["sent_twice"]["safe"], "it knows repeats"
    assert found["zombie"]["safe"]
    assert not found["killed_within"]["safe"]
    assert not found["zombie_within"]["safe"]
    assert all("before shop.py:" in failure["where"] for failure in found["killed_within"]["failures"])


def test_an_effect_that_is_overwritten_fails_under_zombies_only(folder: Path) -> None:
    done = torture(folder, "shop:state", "--effect", "shop:pages", "--field", "color=c{n}", "--stops", "1", "--json")
    assert done.returncode == 1, done.stdout + done.stderr
    found = verdict(done)
    unsafe = {name for name, scenario in found.items() if not scenario["safe"]}
    assert unsafe == {"sent_again_later", "zombie", "two_zombies", "zombie_within"}
    [failure] = found["zombie"]["failures"]
    assert (failure["expected"], failure["seen"]) == ("c3", "c2")
    assert failure["explanation"] == "it is as after message 2: a later effect is missing or was overwritten"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("shop:breaks", "--effect", "shop:pages"), "never works"),
        pytest.param(
            ("shop:fenced", "--effect", "shop:constant"), "does not show what the handler does", marks=pytest.mark.slow
        ),
        pytest.param(("shop:fenced", "--effect", "shop:nothing"), "--effect shop:nothing", marks=pytest.mark.slow),
    ],
)
def test_what_cannot_be_judged_is_said(folder: Path, words: tuple[str, ...], told: str) -> None:
    done = torture(folder, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert told in done.stderr


def test_a_module_that_opens_files_at_its_import_is_imported_by_every_actor_for_itself(
    folder: Path,
) -> None:
    (folder / "opened.py").write_text(
        "import os\nfrom shop import *\nFILE, PID = open('opened', 'w'), os.getpid()\n\n" + _OWN_PID
    )
    done = torture(folder, "opened:handle", "--effect", "opened:total", "--stops", "1", "--json")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "added message 2 twice" in verdict(done)["sent_twice"]["failures"][0]["explanation"]


def test_ctrl_c_ends_everything(folder: Path) -> None:
    command = [*USHER, "torture", "shop:hangs", "--effect", "shop:pages"]
    process = subprocess.Popen(
        command, env=environ_for(folder), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    until(lambda: (folder / "hangs").exists(), 60, "the handler runs")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    until(lambda: not processes_of(folder), 30, "all processes are gone")


def test_the_fixture_passes_a_safe_handler_and_fails_another_with_the_explanation(folder: Path) -> None:
    (folder / "test_shop.py").write_text(
        "def test_safe(usher_torture):\n    usher_torture('shop:fenced', effect='shop:pages', stops=1)\n"
        "def test_not_safe(usher_torture):\n    usher_torture('shop:naive', effect='shop:pages', stops=1)\n"
    )
    # Where Usher is installed the plugin is there by its entry point; here it is named, so that the test is the same
    # everywhere.
    words = [
        "-q",
        "-p",
        "no:usher_torture",
        "-p",
        "usher.consumer.torture.pytest_plugin",
        "-p",
        "no:cacheprovider",
        "test_shop.py",
    ]
    environ = environ_for(folder, PYTHONPATH=str(ROOT))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        env=environ,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert '"10" too often' in done.stdout
