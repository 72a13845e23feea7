"""A folder that `usher init-deploy` wrote, and what runs it."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

import requests

from tests.hands import free_port
from tests.process.machine import ROOT, USHER, environ_for, redis_cli
from usher import Link

FILES = {
    "shop.py": """
import pathlib
from usher import GiveUp, RetryLater
def handle(message):
    if message.fields["text"] == "bad" and not pathlib.Path("mended").exists():
        raise GiveUp("not mended")
    if message.ticket_id == "42" and pathlib.Path("stuck").exists():
        raise RetryLater(after_s=0.5)
    with open("handled", "a") as out:
        out.write(message.ticket_id + " " + message.fields["text"] + chr(10))
"""
}


class HostFolder:
    """A folder that `usher init-deploy` wrote, and the supervisord that runs it."""

    def __init__(self, home: Path, name: str, *words: str, **environ: str) -> None:
        self.folder = home / name
        path = f"{redis_cli().parent}:{environ_for(home)['PATH']}"
        own = {"PATH": path, "PYTHONPATH": f"{home}:{ROOT}", "USHER_AUDIT_ENGINE": "local"}
        self.environ = environ_for(home) | own | environ
        done = subprocess.run(
            [*USHER, "init-deploy", str(self.folder), *words],
            env=self.environ,
            cwd=home,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        lines = (self.folder / "usher.env").read_text().splitlines()
        self.settings = dict(re.findall(r"(\w+)='(.*)'", "\n".join(lines)))

    def start(self) -> None:
        with (self.folder / "out").open("wb") as out:
            self.process = subprocess.Popen(
                [self.folder / "start"], env=self.environ, cwd="/", stdout=out, stderr=out, stdin=subprocess.DEVNULL
            )

    def sh(self, script: str) -> str:
        """What a person does in the folder; it must go well."""
        prelude = "set -euo pipefail; set -a; . ./usher.env; set +a\n"
        done = subprocess.run(
            ["bash", "-c", prelude + script],
            env=self.environ,
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=180,
        )
        assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}\n{self.logs()}"
        return done.stdout

    def logs(self) -> str:
        return "\n".join(
            f"== {file.name}\n{file.read_text(errors='replace')[-3000:]}"
            for file in sorted((self.folder / "state" / "logs").iterdir())
        )

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(90)


def handled(host: HostFolder) -> list[str]:
    path = host.folder / "handled"
    return path.read_text().splitlines() if path.exists() else []


def send_one(url: str, ticket: str, text: str) -> None:
    link = Link(url, "test")
    link.call("XADD", "ticket_stream", "*", "ticket_id", ticket, "text", text)
    link.close()


def one_host(home: Path, **environ: str) -> HostFolder:
    port = free_port(25)
    ports = {"USHER_PORT": str(port), "USHER_REDIS_PORT": str(port + 2)}
    return HostFolder(home, "one", "--handler", "shop:handle", **{"USHER_LEASE_SECONDS": "3", **ports, **environ})


def requests_ready(urls: list[str]) -> bool:
    """Whether all of them are ready."""
    try:
        return all(requests.get(f"{url}/api/health/ready", timeout=20).status_code == 200 for url in urls)
    except requests.ConnectionError:
        return False
