"""`usher run`: processes that all do everything. They need no master, no port and no address of each other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hands import free_port
from tests.process.crew import KEYS, Crew, Producer, out_of_order, overlaps
from tests.process.machine import ROOT, USHER, environ_for, until
from tests.topologies import figures
from usher import Link

pytestmark = pytest.mark.process

#: Nobody may wait for the end of a lease.
_LONG = {"USHER_LEADER_LEASE_SECONDS": "60", "USHER_LEASE_SECONDS": "60"}
_APP = """
import asyncio, sys, usher, orders

async def main():
    async with usher.running(orders.handle, redis_url=sys.argv[1]):
        for number in range(20):
            usher.Producer(sys.argv[1]).send("7", {"n": str(number)})
        while len(orders.seen) < 20:
            await asyncio.sleep(0.01)
    print(*orders.seen)

asyncio.run(main())
"""
_SETTINGS = """
INSTALLED_APPS, SECRET_KEY = ["usher", "shop"], "-"
TASKS = {"default": {"BACKEND": "usher.django.TaskBackend", "OPTIONS": {"redis": "%s", "ticket": "account"}}}
"""
_TASKS = """
try:
    from django.tasks import task
except ImportError:
    from django_tasks import task

@task
def book(account):
    print("booked", account, flush=True)
"""
_ASK = "import usher; print(usher.Producer(usher.redis_url()).call('1', {'n': '0'}, timeout_s=20))"
FILES = {"orders.py": "seen = []\ndef handle(message):\n    seen.append(message.fields['n'])\n", "app.py": _APP}


def _leader(crew: Crew, link: Link) -> str:
    """The program that leads, by the page that it named."""
    url = until(lambda: link.call("GET", KEYS.leader), 20, "somebody leads").decode().rpartition(" ")[2]
    return next(name for name in crew.processes if f"{url}/\n" in (crew.logs / name).read_text())


def test_whoever_leads_may_be_killed_and_nothing_is_lost_or_waits_for_a_lease(folder: Path, link: Link) -> None:
    environ = _LONG | {"USHER_BIND": f"127.0.0.1:{free_port()}", "USHER_DEMO_WORK_MS": "2"}
    with Crew(folder, link.url, **environ) as crew:
        for name in ("a", "b", "c"):
            crew.run(name, "run", "usher.deploy.demo.handlers:record", USHER_CONSUMER_NAME=name)
        crew.until(lambda: len(crew.events("consumer_registered")) == 3, 20, "all are there, at ports of their own")
        producer, gaps_ms = Producer(link, 50), []
        for number in range(4):
            producer.send(400)
            killed, before = _leader(crew, link), len(crew.events("takeover_completed"))
            crew.kill_worker(killed)
            crew.until(lambda before=before: len(crew.events("takeover_completed")) > before, 10, f"kill {number}")
            lost, led = crew.events("worker_started_again", killed)[-1], crew.events("takeover_completed")[-1]
            gaps_ms.append(led["time_ms"] - lost["time_ms"])
        crew.wait_until_handled(producer.accepted, 30)
        crew.wait_until_settled(link)
        figures(gaps_ms=gaps_ms)
        runs = crew.executions()
        assert (out_of_order(runs), overlaps(runs, crew.cut_off_ns)) == ([], [])
        assert crew.handled() == set(producer.accepted)
        assert [crew.stop(name) for name in ("a", "b", "c")] == [0, 0, 0]
        assert link.call("GET", KEYS.leader) is None, "given up, not run out"


def test_who_is_killed_with_all_of_its_program_is_found_dead_by_the_next_leader(folder: Path, link: Link) -> None:
    environ = _LONG | {"USHER_BIND": f"127.0.0.1:{free_port()}", "USHER_DEMO_WORK_MS": "2"}
    with Crew(folder, link.url, **environ) as crew:
        for name in ("a", "b"):
            crew.run(name, "run", "usher.deploy.demo.handlers:record", USHER_CONSUMER_NAME=name)
        crew.until(lambda: len(crew.events("consumer_registered")) == 2, 20, "both are there")
        producer = Producer(link, 50)
        producer.send(400)
        crew.kill_both(_leader(crew, link))
        producer.send(400)
        crew.wait_until_handled(producer.accepted, 30)
        runs = crew.executions()
        assert (out_of_order(runs), overlaps(runs, crew.cut_off_ns)) == ([], [])


@pytest.mark.parametrize(("words", "is_there"), [(["master"], True), (["run", "orders:handle"], False)])
def test_a_master_has_made_its_page_before_consumers_register(
    folder: Path, link: Link, words: list[str], is_there: bool
) -> None:
    """The first one was answered after a second of import on a busy machine, and of a short lease nothing was left."""
    with Crew(folder, link.url, USHER_BIND=f"127.0.0.1:{free_port()}", PYTHONPROFILEIMPORTTIME="1") as crew:
        crew.run("a", *words)
        crew.until(lambda: crew.events("takeover_completed"), 20, "it leads")
        lines = (crew.logs / "a").read_text().splitlines()
        assert any(line.endswith(" flask.app") for line in lines) == is_there


def test_without_a_redis_they_share_one_that_the_last_one_ends(folder: Path) -> None:
    environ = environ_for(folder, USHER_STATE_DIR=str(folder / "state"), USHER_BIND=f"127.0.0.1:{free_port()}")
    send, command = [*USHER, "send", "--ticket", "1"], [*USHER, "orders"]
    with (
        subprocess.Popen(command, env=environ, cwd=folder, stdout=subprocess.PIPE, text=True) as first,
        subprocess.Popen(command, env=environ, cwd=folder, stdout=subprocess.PIPE, text=True) as second,
    ):
        for one in (first, second):
            assert one.stdout is not None
            assert "orders:handle" in [one.stdout.readline() for _ in range(4)][1]
        asked = subprocess.run([sys.executable, "-c", _ASK], env=environ, capture_output=True, text=True, check=False)
        assert (asked.stdout, asked.returncode) == ("None\n", 0), asked.stderr
        lock = folder / "state" / "redis" / "lock"
        for _ in range(2):  # whoever starts it again, it may be killed again
            os.kill(killed := int(lock.read_text()), signal.SIGKILL)
            until(lambda killed=killed: lock.read_text() not in ("", f"{killed}\n"), 10, "another one runs")
            until(lambda: subprocess.run([*send, "n=0"], env=environ, check=False).returncode == 0, 10, "it answers")
        for one, number in ((first, signal.SIGINT), (second, signal.SIGTERM)):
            assert subprocess.run([*send, "n=1"], env=environ, check=False).returncode == 0
            one.send_signal(number)
            assert one.wait(20) == 0
    assert subprocess.run([*send, "n=3"], env=environ, check=False).returncode == 2, "Redis has gone with the last one"


def test_within_a_program_of_ones_own(folder: Path, redis_url: str) -> None:
    environ = environ_for(folder, USHER_STATE_DIR=str(folder / "state"), PYTHONPATH=str(ROOT))
    ran = subprocess.run(
        [sys.executable, "app.py", redis_url], env=environ, cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert (ran.returncode, ran.stdout.split()) == (0, [str(number) for number in range(20)]), ran.stderr


def test_in_django_it_runs_the_tasks(folder: Path, redis_url: str) -> None:
    (folder / "shop").mkdir()
    files = {"site_settings.py": _SETTINGS % redis_url, "shop/__init__.py": "", "shop/tasks.py": _TASKS}
    for name, text in files.items():
        (folder / name).write_text(text)
    given = {"DJANGO_SETTINGS_MODULE": "site_settings", "USHER_BIND": f"127.0.0.1:{free_port()}"}
    environ = environ_for(folder, USHER_STATE_DIR=str(folder / "state"), PYTHONPATH=str(ROOT), **given)
    command = [sys.executable, "-m", "django"]
    with subprocess.Popen([*command, "usher"], env=environ, cwd=folder, stdout=subprocess.PIPE, text=True) as running:
        send = [*command, "shell", "-v0", "-c", "from shop.tasks import book; book.enqueue(account=42)"]
        assert subprocess.run(send, env=environ, cwd=folder, check=False).returncode == 0
        assert running.stdout is not None
        assert any(line == "booked 42\n" for line in running.stdout)
        running.terminate()
        assert running.wait(20) == 0
