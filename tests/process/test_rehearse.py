"""``usher rehearse`` on a terminal: it asks before anything happens, and Ctrl-C ends the handler too."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
from pathlib import Path

import pytest

from tests.process.machine import REDIS, USHER, environ_for, processes_of, until
from usher import Link

pytestmark = pytest.mark.process

_SHOP = """
import subprocess, time

def handle(message):
    if message.ticket_id == "hangs":
        child = subprocess.Popen(["sleep", "600"])
        open("hangs", "w").close()
        child.wait()
"""
FILES = {"shop.py": _SHOP}


def test_it_asks_first_and_ctrl_c_ends_the_handler_and_tells_what_is_known(
    folder: Path, redis_url: str, link: Link
) -> None:
    sent = [
        link.call("XADD", "ticket_stream", "*", "ticket_id", ticket).decode() for ticket in ("well", "hangs", "later")
    ]
    words = [*USHER, "rehearse", "shop:handle", *(word for one in sent for word in ("--message", one))]
    mine, theirs = pty.openpty()

    def started() -> subprocess.Popen[bytes]:
        environ = environ_for(folder, USHER_REDIS_URL=redis_url)
        return subprocess.Popen(
            words, env=environ, cwd=folder, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    os.write(mine, b"n\n")
    declined = started()
    out, err = declined.communicate(timeout=60)
    assert (declined.returncode, out.strip(), (folder / "hangs").exists()) == (2, b"", False)
    assert b"shop:handle is called with 3 messages, one by one." in err
    assert b"REAL" in err
    os.write(mine, b"y\n")
    process = started()
    until((folder / "hangs").exists, 60, "the handler hangs")
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    os.close(mine)
    os.close(theirs)
    assert process.returncode == 130
    assert "1 of 3 messages taken, 2 not tried" in out.decode()
    until(
        lambda: REDIS.issuperset(left.name() for left in processes_of(folder)),
        10,
        "what the handler started is gone too",
    )
