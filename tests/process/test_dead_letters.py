"""Dead letters of a running system: tickets that wait for an operator, redriven by the command and over HTTP, and the
bell."""

from __future__ import annotations

import json
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.hands import EmbeddedRedis, pairs
from tests.process.crew import KEYS, Crew, out_of_order, overlaps
from tests.process.machine import USHER, kill_all_of, processes_of, until
from tests.topologies import figures
from usher import Link

pytestmark = pytest.mark.process

_HANDLERS = '''
from pathlib import Path
from usher.deploy.demo.handlers import record
from usher.common.base.errors import GiveUp


def handle(message):
    """Cannot do what is broken, before somebody has repaired it."""
    if "broken" in message.fields and not Path("repaired").exists():
        raise GiveUp("it is broken")
    record(message)
'''
_TICKETS, _EACH, _UNUSABLE = 300, 3, 2000


class _Hook(BaseHTTPRequestHandler):
    """Refuses the first POST, takes all others."""

    told: list[dict[str, Any]] = []
    answers: list[int] = []

    def do_POST(self) -> None:
        document = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status = 200 if self.answers else 500
        self.answers.append(status)
        if status == 200:
            self.told.append(document)
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def hook() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), _Hook)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://user:secret@127.0.0.1:{server.server_port}/T0/secret"
    server.shutdown()
    server.server_close()
    thread.join(10)


@pytest.fixture(scope="module")
def running(hook: str) -> Iterator[tuple[Crew, Link]]:
    with tempfile.TemporaryDirectory(prefix="usher-t-", dir="/tmp") as name:
        folder = Path(name)
        (folder / "fragile.py").write_text(_HANDLERS)
        with EmbeddedRedis(folder / "redis", port=None, durable=False) as server:
            link = Link(server.url, "test")
            settings = {
                "USHER_DEAD_LETTER_POLICY": "halt",
                "USHER_DEAD_LETTER_WEBHOOK": hook,
                "USHER_LONGEST_MESSAGE_BYTES": "100000",
            }
            with Crew(folder, server.url, USHER_DEMO_WORK_MS="1", **settings) as crew:
                crew.start(2, ["c1", "c2"], "fragile:handle")
                yield crew, link
            link.close()
        left = processes_of(folder)
        kill_all_of(folder)
        assert not left


def _send(link: Link, *messages: dict[str, str]) -> list[str]:
    return [
        reply.decode()
        for reply in link.pipeline(
            [("XADD", KEYS.stream, "*", *[part for pair in m.items() for part in pair]) for m in messages]
        )
    ]


def _usher(crew: Crew, *words: str, code: int = 0) -> str:
    done = subprocess.run(
        [*USHER, *words], env=crew._environ, cwd=crew._home, capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == code, (words, done.stdout[-2000:], done.stderr[-2000:])
    return done.stdout if code != 2 else done.stderr


def _letters(link: Link) -> list[dict[bytes, bytes]]:
    return [pairs(fields) for _, fields in link.call("XRANGE", KEYS.dead, "-", "+")]


def test_parked_tickets_wait_and_go_on_in_stream_order_when_they_are_redriven(running: tuple[Crew, Link]) -> None:
    crew, link = running
    ids = {
        ticket: _send(link, {"ticket_id": ticket, "broken": "1"}, {"ticket_id": ticket})
        for ticket in (f"T{n}" for n in range(_TICKETS))
    }
    crew.until(lambda: link.call("XLEN", KEYS.dead) == _TICKETS, 40, "every ticket has its dead letter")
    others = _send(link, *[{"ticket_id": f"U{n % 10}"} for n in range(50)])
    for ticket in ids:
        ids[ticket] += _send(link, {"ticket_id": ticket})
    _send(link, *[{"text": "no ticket"} for _ in range(_UNUSABLE)], {"ticket_id": "L", "body": "x" * 200_000})
    crew.wait_until_handled(others, within_s=40)
    crew.until(lambda: link.call("XLEN", KEYS.dead) == _TICKETS + _UNUSABLE + 1, 40, "what is unusable is there too")
    assert {run.ticket for run in crew.executions()} == {f"U{n}" for n in range(10)}, (
        "the tickets wait, and nobody else does"
    )
    status = json.loads(_usher(crew, "status", "--json"))
    assert (status["halted"], status["dead_letters"]) == (_TICKETS, _TICKETS + _UNUSABLE + 1)
    shown = json.loads(_usher(crew, "tickets", "explain", "T7", "--json"))
    told = (shown["state"], shown["entries"][0]["id"], shown["dead_letter"]["reason"])
    assert told == ("halted", ids["T7"][0], "gave_up")
    assert "usher dead redrive --all --ticket T7" in _usher(crew, "tickets", "explain", "T7")
    assert "waits for message" in _usher(crew, "tickets", "list")
    assert f"halted {_TICKETS}" in _usher(crew, "status", "--once")
    assert "more than 3" in _usher(crew, "dead", "list", "--limit", "3")

    crew.stop("c1")
    link.call("HSET", KEYS.attempts, ids["T7"][0], "1 1 0")
    (crew._home / "repaired").touch()
    told = json.loads(_usher(crew, "dead", "redrive", "--all", "--error", "broken", "--yes", "--json"))
    assert (told["matched"], told["outcomes"]) == (_TICKETS, {"resumed": _TICKETS})
    assert told["groups"] == [
        {"reason": "gave_up", "error_type": "GiveUp", "at": "fragile.py:10", "policy": "halt", "count": _TICKETS}
    ]
    crew.wait_until_handled([entry_id for mine in ids.values() for entry_id in mine], within_s=60)
    crew.wait_until_settled(link, within_s=30)
    executions = crew.executions()
    for ticket, mine in ids.items():
        assert [run.stream_id for run in executions if run.ticket == ticket] == mine, "in stream order, each once"
    assert {run.attempt for run in executions} == {1}
    assert out_of_order(executions) == []
    assert overlaps(executions, crew.cut_off_ns) == []


def test_thousands_are_redriven_exactly_once_and_dropped(running: tuple[Crew, Link]) -> None:
    crew, link = running
    before = link.call("XLEN", KEYS.stream)
    originals = {fields[b"usher-id"] for fields in _letters(link) if fields[b"usher-reason"] == b"no_ticket_id"}
    assert "stdin is not a terminal: pass --yes" in _usher(
        crew, "dead", "redrive", "--all", "--reason", "no_ticket", code=2
    )
    told = json.loads(_usher(crew, "dead", "redrive", "--all", "--reason", "no_ticket", "--yes", "--json"))
    assert told["outcomes"] == {"added": _UNUSABLE}, "those that are given up again meanwhile are not met"
    assert link.call("XLEN", KEYS.stream) == before + _UNUSABLE
    crew.until(lambda: link.call("XLEN", KEYS.dead) == _UNUSABLE + 1, 40, "they are dead letters again")
    assert {fields[b"uid"] for fields in _letters(link) if fields[b"usher-reason"] == b"no_ticket_id"} == originals, (
        "their uids stay"
    )
    told = json.loads(
        _usher(crew, "dead", "drop", "--all", "--reason", "no_ticket", "--younger-than", "1h", "--yes", "--json")
    )
    assert told["outcomes"] == {"dropped": _UNUSABLE}
    [large] = json.loads(_usher(crew, "dead", "list", "--json"))["dead_letters"]
    assert (large["reason"], large["cut"], large["ticket_id"]) == ("too_large", True, "L")
    assert "too_large" in _usher(crew, "dead", "show", large["id"])
    for filtered in (("--ticket", "another"), ("--reason", "another"), ("--older-than", "1s")):
        assert "filters go with --all" in _usher(crew, "dead", "drop", large["id"], *filtered, "--yes", code=2)
    _usher(crew, "dead", "drop", large["id"], "--why", "too large", "--yes")
    _usher(crew, "dead", "drop", large["id"], "--yes", "--json", code=1)
    _usher(crew, "dead", "show", large["id"], code=1)


def test_large_messages_are_read_a_few_at_a_time_and_without_a_pause(running: tuple[Crew, Link]) -> None:
    crew, link = running
    ids = _send(link, *[{"ticket_id": f"B{n % 40}", "body": "x" * 90_000} for n in range(300)])
    crew.wait_until_handled(ids, within_s=60)
    crew.wait_until_settled(link, within_s=30)
    assert out_of_order(crew.executions()) == []


def test_any_master_redrives_over_http_and_the_bell_has_rung(running: tuple[Crew, Link]) -> None:
    crew, link = running
    (crew._home / "repaired").unlink()
    first, second = _send(link, {"ticket_id": "H", "broken": "1"}, {"ticket_id": "H"})
    crew.until(lambda: len(_letters(link)) == 1, 40, "it is a dead letter")
    (crew._home / "repaired").touch()
    for url in crew.masters:  # the leader, and a standby
        [letter] = requests.get(f"{url}/api/dead-letters", params={"ticket": "H"}, timeout=20).json()["dead_letters"]
        assert (letter["message_id"], letter["policy"]) == (first, "halt")
    whole = requests.get(f"{url}/api/dead-letters/{letter['id']}", timeout=20).json()
    assert whole["message_fields"] == [["ticket_id", "H"], ["broken", "1"]]
    assert "GiveUp: it is broken" in whole["traceback"]
    answers = [
        requests.post(f"{url}/api/dead-letters/redrive", json={"ids": [letter["id"]]}, timeout=20).json()
        for url in crew.masters
    ]
    assert [answer["results"][0]["outcome"] for answer in answers] == ["resumed", "gone"]
    crew.wait_until_handled([first, second], within_s=40)
    crew.wait_until_settled(link, within_s=30)
    assert [run.stream_id for run in crew.executions() if run.ticket == "H"] == [first, second]

    metrics = [requests.get(f"{url}/metrics", timeout=20).text for url in crew.masters]
    assert (
        sum(f'usher_dead_letters_total{{reason="no_ticket_id"}} {2 * _UNUSABLE}.0' in text for text in metrics) == 1
    ), "the leader has counted"
    until(
        lambda: {x["reason"] for d in list(_Hook.told) for x in d["dead_letters"]} >= {"gave_up", "no_ticket_id"},
        40,
        "the hook is told",
    )
    assert 500 in _Hook.answers, "the first was refused, and came again"
    assert all(set(document) == {"program", "stream", "group", "dead_letters", "left_out"} for document in _Hook.told)
    assert all(len(document["dead_letters"]) <= 100 for document in _Hook.told)
    assert "it is broken" not in json.dumps(_Hook.told), "texts and fields stay inside"
    assert "secret" not in crew.log()
    figures(posts=len(_Hook.answers), told=sum(len(document["dead_letters"]) for document in _Hook.told))


def test_messages_that_are_over_run_again_in_order_of_their_ticket(running: tuple[Crew, Link]) -> None:
    crew, link = running
    ids = _send(link, *[{"ticket_id": ticket, "n": str(n)} for n in range(4) for ticket in ("R1", "R2")])
    crew.wait_until_handled(ids, within_s=40)
    told = json.loads(
        _usher(crew, "replay", "--since", ids[0], "--until", ids[-1], "--why", "again", "--yes", "--json")
    )
    assert [one["message_id"] for one in sorted(told["replayed"], key=lambda one: ids.index(one["message_id"]))] == ids
    assert told["same"] == len(ids)
    original = {one["new_id"]: one["message_id"] for one in told["replayed"]}
    again = [run for run in crew.executions() if run.stream_id in original]
    for ticket in ("R1", "R2"):
        ran = [original[run.stream_id] for run in again if run.ticket == ticket]
        assert ran == [one for one in ids if one in ran] and len(ran) == 4
    lines = [one for one in json.loads(_usher(crew, "actions", "--json"))["actions"] if one["what"] == "replay"]
    noted, begun = lines  # the newest first
    assert begun["outcome"] == "begun"
    assert (noted["why"], noted["outcome"]) == ("again", "done 8")
