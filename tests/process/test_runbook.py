"""The runbook: block after block of its commands, each on a system in the state that it is about."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hands import CommandRefused
from tests.process.host_folder import FILES, handled, one_host, requests_ready, send_one
from tests.process.machine import processes_of, until

__all__ = ["FILES"]

pytestmark = pytest.mark.process

_HIGHEST = "18446744073709551615-18446744073709551615"


def blocks(text: str) -> list[tuple[str, str]]:
    """(section, script) of every block of the runbook that is marked to be run."""
    found, section, script = [], "", None
    for line in text.splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        if script is None and line == "```sh run":
            script = ""
        elif script is not None and line == "```":
            found.append((section, script))
            script = None
        elif script is not None:
            script += line + "\n"
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_command_of_the_runbook(folder: Path) -> None:
    """Block after block, each on a system in the state that it is about; and at the end all messages are handled."""
    host = one_host(folder)
    url = host.settings["USHER_REDIS_URL"]
    cli = 'redis-cli --no-auth-warning -u "$REDIS_URL_ADMIN"'

    def stick() -> None:
        (host.folder / "stuck").touch()
        send_one(url, "42", "at last")
        until(lambda: "handler_asked_later" in host.logs(), 30, "the ticket is stuck")

    def unstick() -> None:
        (host.folder / "stuck").unlink()
        until(lambda: "42 at last" in handled(host), 30, "the ticket goes on")

    def bury() -> None:
        (host.folder / "mended").unlink(missing_ok=True)
        send_one(url, "13", "bad")
        until(lambda: "message_given_up" in host.logs(), 30, "a dead letter")

    def exhaust() -> None:
        host.sh(f"{cli} XADD ticket_stream {_HIGHEST} ticket_id 8 text highest")
        until(lambda: "8 highest" in handled(host), 30, "the last message that fits is handled")
        with pytest.raises(CommandRefused, match="exhausted"):
            send_one(url, "8", "one more")

    def start() -> None:
        host.start()
        until(lambda: requests_ready(host.settings["USHER_MASTER_URLS"].split(",")), 60, "the masters are ready")

    def kill_supervisord() -> None:
        host.process.kill()
        host.process.wait()
        assert processes_of(folder), "what it ran goes on"

    def start_again() -> None:
        assert not processes_of(folder), "nothing is left"
        start()

    before: dict[str, Callable[[], object]] = {
        "Killed supervisord": kill_supervisord,
        "Stuck ticket": stick,
        "Lag grows": unstick,
        "Lost group": lambda: (
            send_one(url, "9", "x"),
            host.sh(f"{cli} XGROUP DESTROY ticket_stream concurrency_stream_group"),
        ),
        "The stream takes no more ids": exhaust,
        "Full disk or memory": lambda: host.sh(f"{cli} CONFIG SET maxmemory 1mb"),
        "Dead letters": bury,
        "Restore from a backup": lambda: send_one(url, "99", "after the backup"),
    }
    after: dict[str, Callable[[], object]] = {"Killed supervisord": start_again}
    start()
    told = {}
    for section, script in blocks((host.folder / "runbook.md").read_text()):
        before.pop(section, lambda: None)()
        if "redrive" in script:
            (host.folder / "mended").touch()
        told[section, script] = host.sh(script)
        after.get(section, lambda: None)()
    assert not before, "every section that needs a state is there"
    assert len(told) > 15
    until(lambda: "13 bad" in handled(host), 30, "the dead letter was redriven and handled")
    send_one(url, "7", "in the end")
    until(lambda: "7 in the end" in handled(host), 60, "messages flow")
    for (section, script), said in told.items():
        sys.stdout.write(f"## {section}\n{script}---\n{said}\n")
    assert host.stop() == 0
