"""`deploy/supervisord.conf` under the real supervisord: no program is ever given up because Redis is away."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import xmlrpc.client
from collections.abc import Iterator
from pathlib import Path

import pytest
from supervisor.xmlrpc import SupervisorTransport

from tests.hands import LocalSettings, NotNow, ask, environment, find_redis_server, free_port
from tests.process.machine import ROOT, environ_for, until
from usher import Link

pytestmark = pytest.mark.process

FILES = {
    "shop.py": """
import os
from pathlib import Path

def handle(message):
    Path(message.ticket_id).write_text(os.environ["PYTHONFAULTHANDLER"])
"""
}


class Supervised:
    """The checked-in file, but with a single try more for each program; the Redis of its settings is one that the test
    starts, or not."""

    def __init__(self, folder: Path) -> None:
        text = (ROOT / "deploy" / "supervisord.conf").read_text()
        self.file = folder / "supervisord.conf"
        self.file.write_text(re.sub(r"(?m)^startretries = \d+$", "startretries = 1", text))
        self.state, self.redis_port = folder / "state", free_port()
        (self.state / "logs").mkdir(parents=True)
        environ = environ_for(
            folder, USHER_REDIS_URL=f"redis://127.0.0.1:{self.redis_port}/0", USHER_HANDLER="shop:handle"
        )
        port = free_port()
        self.master = f"http://127.0.0.1:{port}"
        whole = environment(environ, LocalSettings(consumers=1, masters=1, port=port, drain_seconds=0), self.state)
        self.environ = whole | {"USHER_AUTOSTART": "true", "USHER_LEASE_SECONDS": "3", "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "supervisor.supervisord", "-c", str(self.file)],
            cwd=folder,
            env=self.environ,
            stdout=subprocess.DEVNULL,
        )

    def states(self) -> dict[str, str]:
        transport = SupervisorTransport(None, None, f"unix://{self.environ['USHER_CONTROL_SOCKET']}")
        with xmlrpc.client.ServerProxy("http://127.0.0.1", transport=transport) as asked:
            rows = asked.supervisor.getAllProcessInfo()
        assert isinstance(rows, list)
        return {row["group"]: row["statename"] for row in rows if row["group"] in ("master", "consumer")}

    @property
    def is_up(self) -> bool:
        return Path(self.environ["USHER_CONTROL_SOCKET"]).exists()

    def log(self) -> str:
        return "\n".join(file.read_text(errors="replace") for file in sorted((self.state / "logs").iterdir()))


@pytest.fixture
def supervised(folder: Path) -> Iterator[Supervised]:
    made = Supervised(folder)
    until(lambda: made.is_up, 30, "supervisord answers")
    yield made
    made.process.send_signal(signal.SIGTERM)
    made.process.wait(60)


def test_redis_away_for_longer_than_any_retry_and_then_back(supervised: Supervised, folder: Path) -> None:
    def all_have_noticed() -> bool:
        assert "FATAL" not in supervised.states().values(), supervised.log()
        logs = [file.read_text() for file in (supervised.state / "logs").glob("[mc]*.log")]
        return len(logs) == 2 and all("redis_unreachable" in text and "service_retrying" in text for text in logs)

    until(all_have_noticed, 60, "master and consumer have noticed")
    until(
        lambda: ask(f"{supervised.master}/api/health/live").status == 200,
        60,
        "it is alive: a restart would mend nothing",
    )
    assert ask(f"{supervised.master}/api/health/ready").status == 503
    until(lambda: supervised.states() == {"master": "RUNNING", "consumer": "RUNNING"}, 20, "both run")
    words = [str(find_redis_server()), "--port", str(supervised.redis_port), "--save", "", "--dir", str(folder)]
    server = subprocess.Popen(words, stdout=subprocess.DEVNULL, cwd=folder)
    try:
        with Link(f"redis://127.0.0.1:{supervised.redis_port}/0", "test") as link:
            until(lambda: _answers(link), 20, "Redis answers")
            link.call("XADD", "ticket_stream", "*", "ticket_id", "T")
            until((folder / "T").exists, 60, "the message is handled")
            assert (folder / "T").read_text() == "1", "PYTHONFAULTHANDLER is set"
    finally:
        server.terminate()
        server.wait(20)


def _answers(link: Link) -> bool:
    try:
        return bool(link.call("PING") == b"PONG")
    except NotNow:
        return False
