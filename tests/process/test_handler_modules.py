"""What a handler's module may do to its process: set signals, print, end it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.process.crew import KEYS, Crew
from tests.process.machine import USHER, environ_for, kill_all_of, processes_of, until
from usher.common.base.errors import HandlerUnusable
from usher.common.redis.client import Link
from usher.common.runtime.signals import StopAsked
from usher.consumer.__main__ import check_handler
from usher.deploy.local.up import check_programs

pytestmark = pytest.mark.process

_SETS_SIGNALS = """
import signal
import time

signal.signal(signal.SIGTERM, lambda *_: None)
signal.signal(signal.SIGINT, signal.SIG_IGN)


def handle(message):
    print("printed of", message.ticket_id)
    time.sleep(float(message.fields["takes_s"]))
    print("done with", message.ticket_id)
"""
FILES = {
    "sets_signals.py": _SETS_SIGNALS,
    "leaves.py": "import os\nos._exit(3)",
    "crashes.py": "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)",
    "odd.py": (
        "class Odd(Exception):\n    def __str__(self): raise RuntimeError('no')\n    __repr__ = __str__\nraise Odd"
    ),
    "hangs.py": "import ctypes\nctypes.PyDLL(None).sleep(600)",
    "surrogate.py": "raise ValueError('a\\udcffb')",
}


def test_a_module_that_sets_signals_does_not_keep_its_consumer_from_draining(folder: Path, link: Link) -> None:
    with Crew(folder, link.url) as crew:
        crew.start(1, ["c1"], "sets_signals:handle")
        link.call("XADD", KEYS.stream, "*", "ticket_id", "42", "takes_s", "1")
        # Not at its end only: whoever looks for what hangs must see it.
        crew.until(lambda: "printed of 42" in crew.log(), 10, "what was printed is seen")
        began_s = time.monotonic()
        assert crew.stop("c1") == 0
        assert time.monotonic() - began_s < 15
        assert "done with 42" in crew.log()
        assert link.call("XPENDING", KEYS.stream, KEYS.group)[0] == 0


def test_a_module_whose_import_hangs_is_ended_and_told(folder: Path) -> None:
    """Before anything starts; then it is the arbiter that ends a start without progress (test_serving.py)."""
    code = "import usher.consumer.__main__ as consumer; consumer.START_S = 1.0; consumer.check_handler('hangs:handle')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    assert "USHER_HANDLER=hangs:handle: its module was not imported within 1 s" in done.stderr
    assert 'hangs.py", line 2 in <module>' in done.stderr, "where it stood"


@pytest.mark.parametrize(
    ("module", "says"),
    [
        ("leaves", "its module ends the process with exit code 3 when it is imported"),
        ("crashes", "its module ends the process by SIGSEGV when it is imported"),
        ("odd", "cannot be imported: Odd: (its text is unavailable: RuntimeError)"),
        ("surrogate", "cannot be imported: ValueError: a\\udcffb"),
    ],
)
def test_a_module_that_cannot_be_imported_is_told_before_anything_starts(
    folder: Path, redis_url: str, module: str, says: str
) -> None:
    command = [*USHER, "consumer", "--consumer-name", "c1", "--handler", f"{module}:handle", "--redis-url", redis_url]
    done = subprocess.run(
        [*command, "--master-urls", "http://127.0.0.1:1"],
        cwd=folder,
        env=environ_for(folder),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith(f"usher: USHER_HANDLER={module}:handle")
    assert says in line


@pytest.mark.parametrize(
    "left", ["threading.Thread(target=time.sleep, args=(60,)).start()", "subprocess.Popen(['sleep', '60'])"]
)
def test_what_a_module_leaves_behind_at_its_import_is_not_waited_for_by_the_check(folder: Path, left: str) -> None:
    (folder / "leaving.py").write_text(f"import subprocess, threading, time\n{left}\ndef handle(message): ...\n")
    environ = environ_for(folder, USHER_HANDLER="leaving:handle")
    subprocess.run([*USHER, "preflight"], env=environ, cwd=folder, check=True, timeout=30)
    until(lambda: not processes_of(folder), 10, "nothing of the check is left")


def test_what_a_module_forks_at_its_import_is_not_waited_for_by_the_consumer(folder: Path, link: Link) -> None:
    (folder / "forks.py").write_text(
        "import os, time\nif os.fork() == 0:\n    time.sleep(30)\n    os._exit(0)\ndef handle(message): ...\n"
    )
    began_s = time.monotonic()
    with Crew(folder, link.url) as crew:
        crew.start(1, ["c1"], "forks:handle")
        assert time.monotonic() - began_s < 25
        kill_all_of(folder)


def test_a_process_that_a_module_starts_ends_by_the_signals_that_drain_its_consumer(folder: Path, link: Link) -> None:
    """It had the consumer's way to take them, which nobody goes there: Ctrl-C of `usher up` waited for it for longer
    than a consumer may drain."""
    module = (
        "import multiprocessing, time\nchild = multiprocessing.get_context('fork').Process(target=time.sleep,"
        " args=(60,))\nchild.start()\n"
    )
    (folder / "starts.py").write_text(module + "def handle(message):\n    print('child', child.pid, flush=True)\n")
    with Crew(folder, link.url) as crew:
        crew.start(1, ["c1"], "starts:handle")
        link.call("XADD", KEYS.stream, "*", "ticket_id", "42")
        crew.until(lambda: "child " in crew.log(), 10, "the child is told")
        child = psutil.Process(int(crew.log().partition("child ")[2].split()[0]))
        child.terminate()
        until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, 5, "it has ended")
        assert crew.stop("c1") == 0
        kill_all_of(folder)  # what the child process of the check has started


def test_a_process_that_is_ended_as_soon_as_it_was_started_ends(folder: Path, link: Link) -> None:
    """The signal came before the child was done with having been forked, and was lost there: nearly always, if it came
    at once."""
    module = (
        "import multiprocessing, time\nFork = multiprocessing.get_context('fork')\n\ndef handle(message):\n    left ="
        " []\n"
    )
    module += (
        "    for _ in range(20):\n        child = Fork.Process(target=time.sleep, args=(60,))\n        child.start()\n"
    )
    module += (
        "        child.terminate()\n        child.join(0.5)\n        left += [child] * child.is_alive()\n       "
        " child.kill()\n"
    )
    (folder / "at_once.py").write_text(module + "    print('still there:', len(left), flush=True)\n")
    with Crew(folder, link.url) as crew:
        crew.start(1, ["c1"], "at_once:handle")
        link.call("XADD", KEYS.stream, "*", "ticket_id", "42")
        crew.until(lambda: "still there:" in crew.log(), 20, "the handler is done")
        assert "still there: 0" in crew.log()
        assert crew.stop("c1") == 0, "its own signals are not held back"


def test_a_check_that_takes_long_ends_when_it_is_asked_to(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "slow.py").write_text(
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)\n"
    )

    looks = iter([False] * 20 + [True])

    def asked() -> None:
        if next(looks):
            raise StopAsked

    children, fork = list[int](), os.fork
    monkeypatch.setattr(os, "fork", lambda: [children.append(one := fork()), one][1])
    monkeypatch.chdir(folder)
    began_s = time.monotonic()
    with pytest.raises(StopAsked):
        check_handler("slow:handle", asked)
    assert time.monotonic() - began_s < 10
    with pytest.raises(ChildProcessError):  # it has ended, and was waited for
        os.waitpid(*children, os.WNOHANG)


def test_a_module_that_is_killed_at_its_import_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "killed.py").write_text("import os\nos.kill(os.getpid(), 9)\n")
    monkeypatch.chdir(folder)
    with pytest.raises(HandlerUnusable, match="ends the process by SIGKILL when it is imported"):
        check_handler("killed:handle")


def test_who_is_stopped_at_once_does_not_wait_for_the_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slowly.py").write_text("import time\ntime.sleep(8)\ndef handle(message): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    session = os.setsid
    monkeypatch.setattr(os, "setsid", lambda: (time.sleep(0.3), session()))  # on a busy machine the child begins late

    def stopped() -> None:
        raise KeyboardInterrupt

    began_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        check_handler("slowly:handle", stopped)
    assert time.monotonic() - began_s < 3


_HANGS = """
import os, time
open(os.environ["TOLD_PID"], "w").write(str(os.getpid()))
time.sleep(25)
def handle(message): ...
"""


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT])
def test_ctrl_c_during_the_import_of_a_handler_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "hangs_at_import.py").write_text(_HANGS)
    said = tmp_path / "pid"
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}", "TOLD_PID": str(said)}
    words = [sys.executable, "-m", "usher", "run", "hangs_at_import:handle", "--redis-url", "redis://127.0.0.1:1"]
    # nohup, and a shell's &, have a signal ignored by all that they start.
    process = subprocess.Popen(
        words, env=environ, cwd=tmp_path, process_group=0, preexec_fn=lambda: signal.signal(number, signal.SIG_DFL)
    )
    until_s = time.monotonic() + 20
    while not (said.exists() and said.read_text()) and time.monotonic() < until_s:
        time.sleep(0.05)
    child = int(said.read_text())
    os.killpg(process.pid, number)  # as a terminal does
    process.wait(10)
    time.sleep(1.0)
    lives = _lives(child)
    if lives:
        os.kill(child, signal.SIGKILL)
    assert not lives, f"the child of the check lives on after {process.returncode}"


def test_a_module_that_reads_a_setting_at_its_import_is_checked_with_what_the_programs_get(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "asks.py").write_text("import os\nURL = os.environ['USHER_REDIS_URL']\ndef handle(message): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("USHER_REDIS_URL", raising=False)
    given = {
        **os.environ,
        "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}",
        "USHER_REDIS_URL": "redis://127.0.0.1:6399/0",
        "USHER_HANDLER": "asks:handle",
    }
    check_programs(given)
