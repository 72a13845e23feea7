"""Live subscriptions to tickets: real masters and consumers, real HTTP, a master killed in the middle."""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from tests.hands import is_well
from tests.process.crew import KEYS, Crew
from usher import Link

pytestmark = pytest.mark.process

_PATIENCE_S = 30


class Listener:
    """``usher tickets follow --json``, as a process of the crew: it reads Redis, as masters do."""

    def __init__(self, crew: Crew, name: str, ticket: str, *words: str) -> None:
        crew.run(name, "tickets", "follow", ticket, "--json", *words)
        self._log = crew.logs / name

    @property
    def told(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._log.read_text().splitlines(keepends=True) if line.endswith("}\n")]

    def of(self, name: str, fact: str = "message_id") -> list[Any]:
        return [told[fact] for told in self.told if told["event"] == name]


def send(link: Link, ticket: str, count: int) -> list[str]:
    return [
        reply.decode()
        for reply in link.pipeline([("XADD", KEYS.stream, "*", "ticket_id", ticket, "n", n) for n in range(count)])
    ]


def events_url(master: str, ticket: str) -> str:
    return f"{master}/api/tickets/{ticket}/events"


@pytest.mark.slow
def test_a_ticket_is_followed_over_the_death_of_a_master_and_nothing_is_missed_or_told_twice(
    folder: Path, redis_url: str, link: Link
) -> None:
    with Crew(folder, redis_url, USHER_DEMO_WORK_MS="2") as crew:
        crew.start(2, ["c1"])
        listener = Listener(crew, "listener", "T/1 ä")
        crew.until(lambda: listener.of("state", "state") == ["idle"], _PATIENCE_S, "the follower is greeted")
        sent = send(link, "T/1 ä", 20)
        send(link, "T2", 20)
        crew.until(lambda: set(listener.of("completed")) == set(sent), _PATIENCE_S, "all is told")
        first = crew.processes[crew.master_at(crew.masters[0])]
        for process in [*psutil.Process(first.pid).children(), psutil.Process(first.pid)]:
            process.kill()
        sent += send(link, "T/1 ä", 20)
        crew.until(lambda: set(listener.of("completed")) == set(sent), _PATIENCE_S, "all is told by the other master")
        assert listener.of("entry") == sent
        assert listener.of("completed") == sent  # one at a time, in order; and each once
        assert {told["ticket_id"] for told in listener.told} == {"T/1 ä"}
        handed = [one for ids in listener.of("hand_over", "message_ids") for one in ids]
        assert set(sent[:20]) <= set(handed)
        assert not listener.of("gap", "source")
        late = Listener(crew, "late", "T/1 ä", "--from", "0")
        crew.until(
            lambda: late.of("completed") == sent and late.of("entry") == sent,
            _PATIENCE_S,
            "who comes late gets all from the beginning",
        )


def test_followers_have_a_limit_and_leave_room_for_requests(folder: Path, redis_url: str, link: Link) -> None:
    count = 192
    with Crew(folder, redis_url) as crew, ExitStack() as closing:
        crew.start(1, ["c1"])
        [master] = crew.masters
        _check_refusals(master)
        host, _, port = master.removeprefix("http://").partition(":")
        sockets, texts = [], []
        for number in range(count):
            sock = closing.enter_context(socket.create_connection((host, int(port)), timeout=_PATIENCE_S))
            sock.sendall(f"GET /api/tickets/T{number}/events HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            sockets.append(sock)
        texts = [_read_until(sock, b'"state":"idle"') for sock in sockets]
        assert all(text.startswith(b"HTTP/1.1 200 OK\r\n") for text in texts)
        assert is_well(master)[0]
        full = requests.get(events_url(master, "T1"), timeout=_PATIENCE_S)
        assert (full.status_code, full.json()["title"]) == (503, "too_many_followers")
        for number in range(count):
            send(link, f"T{number}", 1)
        for sock in sockets:
            _read_until(sock, b"event: completed")
        for sock in sockets[:9]:
            sock.close()
        crew.until(lambda: _is_let_in(master), _PATIENCE_S, "who has left is noticed")
        ids = send(link, "gap", 3)
        crew.wait_until_settled(link)
        _check_gap(master, link, ids)
        assert crew.stop("master-1") == 0
        for sock in sockets[9:]:
            while sock.recv(65_536):
                pass


def _is_let_in(master: str) -> bool:
    with requests.get(events_url(master, "T1"), stream=True, timeout=_PATIENCE_S) as reply:
        return reply.status_code == 200


def _read_until(sock: socket.socket, wanted: bytes) -> bytes:
    text = b""
    while wanted not in text:
        more = sock.recv(65_536)
        assert more, text
        text += more
    return text


def _check_refusals(master: str) -> None:
    url = events_url(master, "T1")
    wrong = requests.get(url, headers={"Last-Event-ID": "x"}, timeout=_PATIENCE_S)
    assert (wrong.status_code, wrong.json()["errors"][0]["field"]) == (422, "last_event_id")
    assert requests.get(url, headers={"Accept": "text/html"}, timeout=_PATIENCE_S).status_code == 406
    assert (
        requests.get(
            f"{master}/api/tickets/T1", headers={"Accept": "text/event-stream"}, timeout=_PATIENCE_S
        ).status_code
        == 406
    )
    assert requests.head(url, timeout=_PATIENCE_S).status_code == 200


def _check_gap(master: str, link: Link, ids: list[str]) -> None:
    """What was trimmed cannot be told; the completions of the run log are all there."""
    link.call("XTRIM", KEYS.stream, "MAXLEN", 1)
    url = events_url(master, "gap")
    with requests.get(url, headers={"Last-Event-ID": f"{ids[0]}_0-0_0-0"}, stream=True, timeout=_PATIENCE_S) as reply:
        assert reply.headers["Content-Type"] == "text/event-stream"
        told: list[str] = []
        for line in reply.iter_lines(chunk_size=1):
            if line.startswith(b"data: "):
                document = json.loads(line.removeprefix(b"data: "))
                told.append(document.get("source") or document.get("state") or document.get("message_id"))
            if len(told) == 6:
                break
        assert told == ["entries", ids[2], *ids, "idle"]
