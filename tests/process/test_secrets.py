"""Secrets of a running system turn up nowhere: logs at debug, answers, command lines, files that others may read."""

from __future__ import annotations

import tempfile
from pathlib import Path

import psutil
import pytest
import requests

from tests.doors import tokens_file
from tests.hands import EmbeddedRedis, Role
from tests.process.crew import KEYS, Crew
from tests.process.machine import processes_of
from usher import Link

pytestmark = pytest.mark.process

_HANDLER = """
def handle(message):
    raise ValueError("this one fails")
"""


def test_no_secret_is_in_a_log_an_answer_a_command_line_or_an_open_file() -> None:
    secrets = {
        "token": "CANARY-token",
        "viewer": "CANARY-viewer",
        "hook": "CANARY-hook",
        "payload": "CANARY-payload",
        "guess": "CANARY-guess",
    }
    with (
        tempfile.TemporaryDirectory(prefix="usher-t-", dir="/tmp") as name,
        EmbeddedRedis(Path(name) / "redis", port=None, durable=False) as server,
    ):
        folder = Path(name)
        (folder / "failing.py").write_text(_HANDLER)
        settings = {"USHER_API_TOKEN": secrets["token"]}
        settings["USHER_TOKENS_FILE"] = tokens_file(folder, (Role.VIEWER, "vera", secrets["viewer"]))
        settings |= {"USHER_LOG_LEVEL": "debug", "USHER_MAX_ATTEMPTS": "2"}
        settings["USHER_DEAD_LETTER_WEBHOOK"] = f"http://user:{secrets['hook']}@127.0.0.1:1/{secrets['hook']}"
        secrets["redis"] = server.url.partition("@")[0].rpartition(":")[2]
        link = Link(server.url, "test")
        with Crew(folder, server.url, **settings) as crew:
            crew.start_master()
            crew.start_consumer("c1", "failing:handle")
            [url] = crew.masters
            link.call("XADD", KEYS.stream, "*", "ticket_id", "T", "body", secrets["payload"])
            crew.until(lambda: link.call("XLEN", KEYS.dead) == 1, 60, "the message is a dead letter")
            answers = ""
            for token in (None, secrets["guess"], secrets["viewer"], secrets["token"]):
                headers = {} if token is None else {"Authorization": f"Bearer {token}"}
                for path in (
                    "/api/consumers",
                    "/api/tickets",
                    "/api/health",
                    "/metrics",
                    "/api/openapi.json",
                    f"/nowhere/{secrets['guess']}",
                ):
                    answers += requests.get(url + path, headers=headers, timeout=20).text
                answers += requests.post(
                    f"{url}/api/consumers/register", headers=headers, json={"name": secrets["guess"] + "!"}, timeout=20
                ).text
            assert "unauthorized" in answers
            assert "invalid_fields" in answers
            lines = [" ".join(process.cmdline()) for process in processes_of(folder) if psutil.pid_exists(process.pid)]
            logs = crew.log()
            others_read = [
                file
                for file in (folder / "crew" / "state").rglob("*")
                if file.is_file() and file.stat().st_mode & 0o077
            ]
        link.close()
    assert "message_given_up" in logs
    for kind, secret in secrets.items():
        assert secret not in logs, kind
        assert secret not in answers, kind
        assert not any(secret in line for line in lines), kind
    assert not others_read
