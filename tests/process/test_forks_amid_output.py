"""A child is forked while another thread of its parent is in the middle of writing: in the child that thread is not
there to end it."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.process

_ENDS = """
def ends(pid, within_s):
    until_s = time.monotonic() + within_s
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        if time.monotonic() > until_s:
            os.kill(pid, signal.SIGKILL)
            os.write(2, b"a child hangs")
            os._exit(1)
        time.sleep(0.001)
"""

_WHILE_A_THREAD_LOGS = f"""
import os, signal, sys, threading, time
from usher.common.base.log import configure, event
{_ENDS}
def read_on():
    time.sleep(0.3)
    while os.read(read_end, 65536):
        pass

read_end, write_end = os.pipe()
sys.stderr = os.fdopen(write_end, "w")
configure("c1", "info", "human")
threading.Thread(target=event, args=("said",), kwargs=dict(text="x" * 1_000_000), daemon=True).start()
os.read(read_end, 1)
threading.Thread(target=read_on, daemon=True).start()
if (pid := os.fork()) == 0:
    event("child_says")
    os._exit(0)
ends(pid, 10)
os._exit(0)
"""

_WHILE_A_THREAD_PRINTS = f"""
import os, signal, sys, threading, time
from usher.common.runtime.fork_guard import ForkGuard
{_ENDS}
read_end, write_end = os.pipe()
sys.stdout = os.fdopen(write_end, "w")
threading.Thread(target=lambda: print("x" * 1_000_000, flush=True), daemon=True).start()
os.read(read_end, 1)
with ForkGuard():
    pid = os.fork()
ends(pid, 10)
os._exit(0)  # the thread still prints
"""


@pytest.mark.parametrize("script", [_WHILE_A_THREAD_LOGS, _WHILE_A_THREAD_PRINTS], ids=["logs", "prints"])
def test_it_ends(script: str) -> None:
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
