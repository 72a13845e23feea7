"""What arrives while a message of its ticket runs: merged, waited for, interrupted, cleared; through real programs."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.commands import usher
from tests.hands import pairs
from tests.process.crew import KEYS, Crew
from tests.process.machine import until
from usher import Link, Producer
from usher.common.base.errors import Behind
from usher.common.protocol.run_log import decode

pytestmark = pytest.mark.process

log = logging.getLogger(__name__)

_HANDLERS = '''
import asyncio, json, os, time
from usher import handler


def note(message, *others, **more):
    told = {"run": message.id, "ticket": message.ticket_id, "took": [one.id for one in (message, *others)], **more}
    with open("runs.jsonl", "a") as runs:
        runs.write(json.dumps(told) + "\\n")


async def converse(message):
    """A model that takes its time; what comes meanwhile steers it; a further message is waited for when asked."""
    others = message.absorb()
    for _ in range(10):
        await asyncio.sleep(float(message.fields.get("model_s", 0.2)) / 10)
        others += message.absorb()
    if message.fields.get("do") == "wait":
        note(message, began=True)
        others += filter(None, [await message.more(20), await message.more(0.1)])
    note(message, *others)


async def answer_async(message):
    message.attempt == 1 and message.fields.get("dies") and os.abort()
    note(message, began=True)
    try:
        await asyncio.sleep(60 if message.fields.get("do") == "talk" else 0)
    except asyncio.CancelledError:
        note(message, told=message.cancelled.is_set())
        if message.fields.get("ends") != "well":
            raise


def answer(message):
    message.attempt == 1 and message.fields.get("dies") and os.abort()
    note(message, began=True)
    until = time.monotonic() + (60 if message.fields.get("do") == "talk" else 0)
    while time.monotonic() < until and not message.cancelled.wait(0.05):
        pass
    if message.fields.get("do") == "talk":
        note(message, told=message.cancelled.is_set())
'''
FILES = {"talks.py": _HANDLERS}


@pytest.fixture
def crew(folder: Path, link: Link) -> Iterator[Crew]:
    with Crew(folder, link.url, USHER_RETRY_SECONDS="0.05", USHER_WATCH="1") as made:
        yield made


def _runs(folder: Path) -> list[dict[str, Any]]:
    file = folder / "runs.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _letters(link: Link) -> list[tuple[str, str]]:
    found = [pairs(fields) for _, fields in link.call("XRANGE", KEYS.dead, "-", "+")]
    return [(one[b"usher-id"].decode(), one[b"usher-reason"].decode()) for one in found]


def _ended(link: Link) -> list[tuple[str, str, str]]:
    """(id, outcome, the run that absorbed it), in the order of the run log."""
    records = [decode(fields[1]) for _, fields in link.call("XRANGE", KEYS.runs, "-", "+")]
    return [(one.id, one.outcome, one.into) for record in records for one in record]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("many", "gap_s", "model_s"), [(60, 0.05, 0.2), pytest.param(200, 0.3, 2.0, marks=pytest.mark.slow)]
)
def test_a_conversation_whose_consumers_are_killed_has_each_message_in_one_effective_run_in_order(
    crew: Crew, folder: Path, link: Link, many: int, gap_s: float, model_s: float
) -> None:
    crew.start(1, ["c1", "c2"], "talks:converse")
    producer, ids = Producer(link.url), list[str]()
    for number in range(many):
        ids.append(producer.send("chat-1", {"n": number, "model_s": model_s}))
        time.sleep(gap_s)
        if number % (many // 10) == many // 20:
            owner = (link.call("HGET", KEYS.tickets, b"chat-1") or b"").partition(b":")[0].decode()
            for name in {owner} & {"c1", "c2"} or ["c1"]:
                crew.kill_both(name)
                crew.processes.pop(name).wait(10)
                crew.start_consumer(name, "talks:converse")
    crew.until(
        lambda: not link.call("XPENDING", KEYS.stream, KEYS.group)[0] and len(_done(link)) == many, 150, "all done"
    )
    done = [one for one in _ended(link) if one[1] in ("done", "merged")]
    assert [one[0] for one in done] == ids, "each once, in order"
    runs = [run_id for run_id, outcome, _ in done if outcome == "done"]
    log.info("%d messages, 10 kills: %d effective runs, %d merged", many, len(runs), many - len(runs))
    assert len(runs) < 0.8 * many, "many were merged"
    assert {into for _, outcome, into in done if outcome == "merged"} <= set(runs)
    assert not _letters(link)
    # What its handler saw of the effective runs is what the run log has.
    last = {run["run"]: run["took"] for run in _runs(folder)}
    for run_id in runs:
        assert last[run_id] == [run_id, *(one for one, _, into in done if into == run_id)]


def _done(link: Link) -> list[str]:
    return [one for one, outcome, _ in _ended(link) if outcome in ("done", "merged")]


def test_a_run_waits_for_the_next_message_without_asking(crew: Crew, folder: Path, link: Link) -> None:
    crew.start(1, ["c1"], "talks:converse")
    producer = Producer(link.url)
    first = producer.send("chat-1", {"do": "wait"})
    until(lambda: _runs(folder), 20, "it waits")
    time.sleep(0.5)
    second = producer.send("chat-1", {"n": 2})
    until(lambda: len(_runs(folder)) == 2, 5, "it went on")
    assert _runs(folder)[-1]["took"] == [first, second]
    until(lambda: _ended(link) == [(first, "done", ""), (second, "merged", first)], 10, "both are over")


@pytest.mark.parametrize("handler", ["answer", "answer_async"])
def test_a_run_is_interrupted_by_command_by_http_and_by_a_producer(
    crew: Crew, folder: Path, link: Link, handler: str, capsys: pytest.CaptureFixture[str]
) -> None:
    crew.start(1, ["c1"], f"talks:{handler}")
    producer = Producer(link.url)

    def began(entry_id: str) -> bool:
        return any(run["run"] == entry_id and "began" in run for run in _runs(folder))

    first = producer.send("chat-1", {"do": "talk", "ends": "well"})
    other = producer.send("chat-2", {"do": "talk"})
    until(lambda: began(first) and began(other), 20, "they run")
    assert producer.interrupt("chat-1")
    until(lambda: (first, "done", "") in _ended(link), 10, "it ended well")
    assert usher("tickets", "interrupt", "chat-2", "--with", "n=3", "--redis-url", link.url) == 0
    assert "is told to end" in capsys.readouterr().out
    if handler == "answer":
        until(lambda: (other, "done", "") in _ended(link), 10, "it ended, too")
        assert not _letters(link)
    else:
        until(lambda: _letters(link) == [(other, "gave_up")], 10, "what lets the error through is given up")
    until(lambda: len(_ended(link)) == 3, 10, "what was sent along ran after it")
    assert [run["told"] for run in _runs(folder) if "told" in run] == [True, True]
    assert not producer.interrupt("chat-9")
    [url] = crew.masters
    third = producer.send("chat-1", {"do": "talk", "ends": "well", "dies": 1})  # then it runs in a process of its own
    until(lambda: began(third), 20, "it runs")
    status, document = _ask(url, "/api/tickets/chat-1/interrupt", {})
    assert (status, document["outcome"]) == (200, "asked")
    until(lambda: (third, "done", "") in _ended(link), 10, "it ended")
    told = [run.get("interrupted") for run in _ask(url, f"/api/messages/{third}")[1]["executions"]]
    assert told == [None, True]
    capsys.readouterr()
    assert usher("tickets", "finished", "--redis-url", link.url) == 0
    assert "interrupted" in capsys.readouterr().out
    assert ", interrupted" in requests.get(f"{url}/messages/{third}", timeout=10).text
    assert _ask(url, "/api/tickets/chat-1/interrupt", {})[0] == 409
    assert crew.processes["c1"].poll() is None


def _ask(url: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
    answered = requests.request("GET" if body is None else "POST", url + path, json=body, timeout=10)
    return answered.status_code, answered.json()


def test_what_waits_of_a_ticket_is_cleared_and_what_runs_is_left_alone(crew: Crew, folder: Path, link: Link) -> None:
    crew.start(1, ["c1"], "talks:answer")
    producer = Producer(link.url, ticket_limit=4)
    ids = [producer.send("chat-1", {"do": "talk"}) for _ in range(4)]
    with pytest.raises(Behind, match="chat-1 is behind: 4 messages wait"):
        producer.send("chat-1", {"n": 5})
    other = producer.send("chat-2", {"n": 1})
    until(lambda: other in [run["run"] for run in _runs(folder)] and len(_runs(folder)) >= 2, 20, "they run")
    time.sleep(0.5)
    assert usher("tickets", "clear", "chat-1", "--yes", "--redis-url", link.url) == 0
    assert not _letters(link), "in their turn"
    assert producer.interrupt("chat-1")
    until(lambda: _letters(link) == [(one, "cleared") for one in ids[1:]], 10, "in order")
    later = producer.send("chat-1", {"n": 6})
    until(lambda: set(_done(link)) == {ids[0], other, later}, 10, "the ticket goes on")


def test_the_most_that_may_wait_of_a_ticket_is_a_rule_for_those_who_send_without_a_library(
    crew: Crew, folder: Path, link: Link, capsys: pytest.CaptureFixture[str]
) -> None:
    at = ("--redis-url", link.url)
    crew.start(1, ["c1"], "talks:answer")
    assert usher("limit", "--pattern", "chat-*", "--messages", "3", *at) == 0

    def send(ticket: str, count: int, **fields: str) -> list[str]:
        given = [part for pair in {"ticket_id": ticket, **fields}.items() for part in pair]
        return [one.decode() for one in link.all_of([("XADD", KEYS.stream, "*", *given)] * count)]

    [first] = send("chat-1", 1, do="talk")
    until(lambda: first in [run["run"] for run in _runs(folder)], 20, "it runs")
    later, others = send("chat-1", 5), send("other", 5)
    until(lambda: _letters(link) == [(one, "over_limit") for one in later[2:]], 10, "what came first stays")
    until(lambda: set(others) <= set(_done(link)), 10, "others are not concerned")
    capsys.readouterr()
    assert usher("tickets", "explain", "chat-1", *at) == 0
    assert "limited to 3 unfinished messages" in capsys.readouterr().out
    assert usher("dead", "list", *at) == 0
    assert capsys.readouterr().out.count("over_limit") == 3
    assert Producer(link.url).interrupt("chat-1")
    again = [until(lambda: first in _done(link) and send("chat-1", 1), 10, "there is room again")[0]]
    until(lambda: [one for one in _done(link) if one not in others] == [first, *later[:2], *again], 10, "in order")
    audited = usher("audit", "--engine", "local", "--audit-dir", str(folder / "audit"), *at)
    assert audited == 0, capsys.readouterr().out
    assert [one for one in crew.events("messages_rejected") if one["reason"] == "over_limit"]
