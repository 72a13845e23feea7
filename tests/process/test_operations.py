"""What an operator asks of a running system and does to it: explain, live rules, drain, the action log."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
from click.testing import CliRunner

from tests.hands import pairs
from tests.process.crew import KEYS, Crew, Producer, out_of_order, overlaps
from tests.process.machine import until
from tests.tuned import tuned
from usher import Link
from usher.cli import usher as usher_command

pytestmark = pytest.mark.process

FILES = {
    "slowly.py": """
import json
import os
import re
import time
from pathlib import Path
from usher.deploy.demo.handlers import record
from usher.common.base.errors import RetryLater


def handle(message):
    while "until" in message.fields and not Path(message.fields["until"]).exists():
        time.sleep(0.02)
    if "later" in message.fields and not Path(message.fields["later"]).exists():
        raise RetryLater(after_s=300)
    if "fail" in message.fields:
        raise RetryLater(after_s=300)
    record(message)
"""
}


class Api:
    """The masters over HTTP; any of them may be asked."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew

    def ask(self, method: str, path: str, status: int = 200, master: int = 0, **more: Any) -> Any:
        answered = requests.request(method, self._crew.masters[master] + path, timeout=20, **more)
        assert answered.status_code == (status or answered.status_code), answered.text
        return answered.json()

    def explain(self, ticket: str, state: str, master: int = 0, reason: str = "") -> dict[str, Any]:
        """Wait until the ticket is in the state."""
        last: dict[str, Any] = {}

        def is_so() -> bool:
            try:
                last.update(self.ask("GET", f"/api/explain?id={ticket}", master=master))
            except requests.ConnectionError:  # it is being started
                return False
            return last["state"] == state and reason in ("", *(one["code"] for one in last["reasons"]))

        try:
            until(is_so, 30, f"{ticket} is {state}")
        except AssertionError:
            raise AssertionError(last) from None
        return last

    def rule(self, status: int = 201, **rule: Any) -> dict[str, Any]:
        made: dict[str, Any] = self.ask("POST", "/api/rules", status, json=rule)
        return made


@pytest.fixture
def crew(folder: Path, link: Link) -> Iterator[Crew]:
    environ = {"USHER_DEMO_WORK_MS": "1"} | tuned(RECONCILE_S=1, TICKET_WINDOW=20)
    with Crew(folder, link.url, **environ) as made:
        made.start(2, ["c1", "c2"], "slowly:handle")
        yield made


def send(link: Link, *messages: dict[str, str]) -> list[str]:
    return [
        reply.decode()
        for reply in link.pipeline(
            [("XADD", KEYS.stream, "*", *[part for pair in m.items() for part in pair]) for m in messages]
        )
    ]


def leader(link: Link) -> str:
    held = link.call("GET", KEYS.leader)
    return (held or b"").decode().rpartition(" ")[2]


def test_explain_says_what_runs_since_when_and_who_waits_behind_it(crew: Crew, link: Link) -> None:
    api = Api(crew)
    first, second = send(link, {"ticket_id": "R", "until": "go"}, {"ticket_id": "R"})
    [failed] = send(link, {"ticket_id": "F/x", "fail": "1"})
    for master in (0, 1):
        told = api.explain("R", "running", master)
        owner, fence = told["owner"]["name"], told["fence"]
        assert told["summary"].startswith(f"{first} has run on ")
        assert told["summary"].endswith(f": attempt 1 of 8, fencing token {fence}")
        assert re.search(f"{second} .sent .* ago. waits behind {first}", " ".join(told["sentences"]))
        rows = [(entry["id"], entry["state"], entry["behind"]) for entry in told["entries"]]
        assert rows == [(first, "running", None), (second, "handed_over", first)]
        assert abs(told["time_ms"] - told["entries"][0]["started_ms"]) < 60_000
        waiting = api.explain("F%2Fx", "put_off", master)
        assert 0 < waiting["until_ms"] - time.time_ns() // 1_000_000 <= 300_000
        assert waiting["entries"][0]["id"] == failed
    assert api.explain("nobody", "idle")["waits_for"] is None
    shown = usher(crew, "consumers", "show", owner)
    assert re.search(rf"R +{first} +1 +[0-9.]+ ?(ms|s)", shown), shown
    assert re.search(
        r"process [0-9]+ *\n.*started +[0-9].*\n.*version +[0-9].*\n.*handler +\S+:\S+.*\n.*memory +[0-9,]+ MiB", shown
    ), shown
    assert "'nobody' is registered" in usher(crew, "consumers", "show", "nobody", code=1)

    drained = api.ask("POST", f"/api/consumers/{owner}/drain", json={"reason": "its disk is full"})
    assert (drained["outcome"], drained["rule"]["target"]) == ("set", "consumer")
    told = api.explain("R", "running", reason="owner_paused")
    assert told["owner"]["paused"] is True
    assert any(f"anybody drained consumer {owner}: its disk is full" in sentence for sentence in told["sentences"])
    other = "c1" if owner == "c2" else "c2"
    ids = send(link, *[{"ticket_id": f"N{number}"} for number in range(60)])
    crew.wait_until_handled(ids, within_s=30)
    assert {run.consumer for run in crew.executions() if run.stream_id in ids} == {other}
    former = {row["incarnation"] for row in api.ask("GET", "/api/consumers")["consumers"]}
    crew.kill_worker(owner)
    crew.until(
        lambda: {row["incarnation"] for row in api.ask("GET", "/api/consumers")["consumers"]} - former,
        30,
        f"{owner} is back",
    )
    again = send(link, *[{"ticket_id": f"M{number}"} for number in range(60)])
    crew.wait_until_handled(again, within_s=30)
    assert {run.consumer for run in crew.executions() if run.stream_id in again} == {other}, (
        "a drain holds for the name, not for one process"
    )

    def states() -> dict[str, str]:
        return {row["name"]: row["state"] for row in api.ask("GET", "/api/consumers")["consumers"]}

    crew.until(lambda: states() == {owner: "paused", other: "live"}, 30, "it is no longer starting")
    api.ask("POST", f"/api/consumers/{owner}/resume", json={}, master=1)
    api.ask("POST", f"/api/consumers/{owner}/resume", 404, json={})
    api.ask("POST", "/api/consumers/nobody/drain", 404, json={})
    (crew._home / "go").touch()
    crew.wait_until_handled([first, second], within_s=30)

    actions = api.ask("GET", "/api/actions")["actions"]
    assert [(line["what"], line["on"], line["why"], line["outcome"]) for line in actions] == [
        ("resume", f"consumer {owner}", "", "lifted"),
        ("drain", f"consumer {owner}", "its disk is full", "set"),
    ]
    assert {(line["who"], line["via"]) for line in actions} == {("anybody", "http")}


def test_a_paused_ticket_waits_through_the_death_of_the_leader_and_goes_on_in_order_while_others_never_stop(
    crew: Crew, link: Link
) -> None:
    api = Api(crew)
    producer = Producer(link, 10)
    producer.send(200)
    paused = api.rule(target="pattern", value="T[34]", action="pause", reason="the customer asked")
    assert paused["note"].startswith("set; ")
    started = {run.stream_id for run in crew.executions()}
    before = set(producer.accepted)
    producer.send(600)
    later = [(entry_id, _ticket(link, entry_id)) for entry_id in producer.accepted if entry_id not in before]
    held = {name: [entry_id for entry_id, ticket in later if ticket == name] for name in ("T3", "T4")}
    others = [entry_id for entry_id in producer.accepted if entry_id not in {*held["T3"], *held["T4"]}]
    crew.wait_until_handled(
        [entry_id for entry_id in others if entry_id not in before or entry_id in started], within_s=40
    )
    told = api.explain("T3", "paused")
    assert "paused by anybody: the customer asked" in told["summary"]
    psutil.Process(crew.worker_of(crew.master_at(leader(link)))).kill()
    producer.send(200)
    last = producer.accepted[-200:]
    crew.wait_until_handled([entry_id for entry_id in last if _ticket(link, entry_id) not in held], within_s=40)
    assert not {*held["T3"], *held["T4"]} & {run.stream_id for run in crew.executions()}, "whoever leads keeps the rule"
    crew.until(crew.is_well, 30, "both masters are well")
    api.ask("DELETE", f"/api/rules/{paused['rule']['id']}?reason=solved")
    crew.wait_until_handled(producer.accepted, within_s=40)
    crew.wait_until_settled(link)
    executions = crew.executions()
    assert out_of_order(executions) == []
    assert overlaps(executions, crew.cut_off_ns) == []
    assert api.ask("GET", "/api/rules")["rules"] == []


def _ticket(link: Link, entry_id: str) -> str:
    [(_, fields)] = link.call("XRANGE", KEYS.stream, entry_id, entry_id)
    return str(pairs(fields)[b"ticket_id"].decode())


def test_what_a_rule_slows_goes_at_its_rate(crew: Crew, link: Link) -> None:
    api = Api(crew)
    slowed = api.rule(target="ticket", value="S", action="slow", rate_per_second=10.0)
    slow = send(link, *[{"ticket_id": "S"} for _ in range(25)])
    others = send(link, *[{"ticket_id": f"T{number}"} for number in range(50)])
    crew.wait_until_handled(others, within_s=30)
    api.explain("S", "waiting", crew.masters.index(leader(link)), "rule_slow")
    crew.wait_until_handled(slow, within_s=30)
    starts = [run.start_ns for run in crew.executions() if run.ticket == "S"]
    assert (starts[-1] - starts[0]) / 1e9 > 1.2, "25 at 10 a second, of which 10 may come at once"
    for wrong in (
        {"target": "ticket", "value": "T", "action": "slow"},
        {"target": "ticket", "value": "T", "action": "pause", "rate_per_second": 1.0},
        {"target": "ticket", "value": "", "action": "pause"},
        {"target": "everything", "value": "x", "action": "pause"},
        {"target": "ticket", "value": "x" * 257, "action": "pause"},
        {"target": "stream", "value": "another", "action": "pause"},
        {"target": "consumer", "value": "c1", "action": "slow", "rate_per_second": 1.0},
        {"target": "nobody", "value": "x", "action": "pause"},
        {"target": "ticket", "value": "x", "action": "pause", "reason": "two\nlines"},
        {"target": "ticket", "value": "x", "action": "pause", "more": 1},
    ):
        assert api.ask("POST", "/api/rules", 422, json=wrong)["title"] == "invalid_fields"
    assert len(api.ask("GET", "/api/rules")["rules"]) == 1
    api.ask("DELETE", "/api/rules/nobody", 404)
    api.ask("GET", "/api/actions?cursor=x", 422)
    api.ask("DELETE", f"/api/rules/{slowed['rule']['id']}")
    assert out_of_order(crew.executions()) == []


def test_the_commands_do_the_same_and_need_no_master_for_it(crew: Crew, link: Link) -> None:
    first, second = send(link, {"ticket_id": "R", "until": "go"}, {"ticket_id": "R"})
    api = Api(crew)
    owner = api.explain("R", "running")["owner"]["name"]
    assert f"has run on {owner} for" in usher(crew, "tickets", "explain", "R")
    told = json.loads(usher(crew, "pause", "R", "--reason", "look at it", "--json"))
    assert (told["outcome"], told["handed_over"], told["handed_over_is_exact"]) == ("set", 2, True)
    assert "slow ticket R: replaced; 2 already handed over will finish" in usher(crew, "slow", "R", "--rate", "5")
    assert "pause pattern R*: set; " in usher(crew, "pause", "--pattern", "R*")
    assert "another rule fits it too" in usher(crew, "resume", "R")
    assert json.loads(usher(crew, "rules", "list", "--json"))["rules"][0]["value"] == "R*"
    assert "R*" in usher(crew, "rules")
    assert "there is no rule" in usher(crew, "resume", "R", code=1)
    for master in ("master-1", "master-2"):
        crew.stop(master)
    told = json.loads(usher(crew, "tickets", "explain", "R", "--json"))
    assert (told["state"], told["owner"]["name"], told["leader_url"]) == ("handed_over", owner, None)
    assert re.search(f"{second} .sent .* ago. waits behind {first}", " ".join(told["sentences"]))
    assert "finish" in usher(crew, "consumers", "drain", owner, "--reason", "moving")
    assert "paused" in usher(crew, "consumers", "list")
    usher(crew, "consumers", "drain", "nobody", code=1)
    usher(crew, "consumers", "resume", owner)
    usher(crew, "resume", "--pattern", "R*")
    lines = json.loads(usher(crew, "actions", "--json"))["actions"]
    assert [line["what"] for line in lines] == ["resume", "resume", "drain", "resume", "pause", "slow", "pause"]
    assert {line["via"] for line in lines} == {"cli"}
    assert "look at it" in usher(crew, "actions")
    (crew._home / "go").touch()
    crew.wait_until_handled([first, second], within_s=30)


def test_a_ticket_that_waits_is_started_now_and_goes_on_in_order(crew: Crew, link: Link) -> None:
    ids = send(link, {"ticket_id": "W", "later": "now"}, {"ticket_id": "W"})
    api = Api(crew)
    _wait_until_it_waits(api, "W")
    (crew._home / "now").touch()
    told = json.loads(usher(crew, "tickets", "retry", "W", "--why", "it is there", "--json"))
    assert (told["outcome"] in ("asked", "done"), told["message_id"]) == (True, ids[0])
    crew.wait_until_handled(ids, within_s=30)
    assert out_of_order(crew.executions()) == []
    assert "nothing of it waits for its next attempt" in usher(crew, "tickets", "retry", "W", code=1)
    [line] = api.ask("GET", "/api/actions")["actions"]
    assert (line["what"], line["on"], line["why"]) == ("retry", f"ticket W, message {ids[0]}", "it is there")


def test_the_first_message_is_given_up_and_the_next_one_runs(crew: Crew, link: Link) -> None:
    first, second = send(link, {"ticket_id": "G", "later": "never"}, {"ticket_id": "G"})
    api = Api(crew)
    _wait_until_it_waits(api, "G")
    assert "stdin is not a terminal: pass --yes" in usher(crew, "tickets", "give-up", "G", code=2)
    api.ask("POST", "/api/orders", json=_order("G", "give_up", reason="refunded"))
    crew.wait_until_handled([second], within_s=30)
    [(_, letter)] = link.call("XRANGE", KEYS.dead, "-", "+")
    assert (pairs(letter)[b"usher-id"].decode(), pairs(letter)[b"usher-reason"]) == (first, b"operator")
    assert api.ask("POST", "/api/orders", 409, json=_order("G", "give_up"))["title"] == "order_refused"
    for wrong in ({"ticket_id": "G"}, _order("G", "eat"), _order("", "retry"), _order("G", "retry", more=1)):
        assert api.ask("POST", "/api/orders", 422, json=wrong)["title"] == "invalid_fields"


def test_a_run_is_ended_and_the_message_runs_again_in_a_process_of_its_own(crew: Crew, link: Link) -> None:
    ids = send(link, {"ticket_id": "C", "until": "go"}, {"ticket_id": "C"})
    api = Api(crew)
    owner = api.explain("C", "running")["owner"]
    assert "counts as a crash" in usher(crew, "tickets", "cancel", "C", "--preview")
    assert usher(crew, "tickets", "cancel", "C", "--yes").startswith("asked: ")
    told = api.explain("C", "running", reason="suspect_runs")
    assert told["owner"]["incarnation"] != owner["incarnation"]
    api.ask("POST", "/api/orders", json=_order("C", "cancel"))
    (crew._home / "go").touch()
    crew.wait_until_handled(ids, within_s=30)
    assert out_of_order(crew.executions()) == []


def _wait_until_it_waits(api: Api, ticket: str) -> None:
    def is_so() -> bool:
        told = api.ask("POST", "/api/orders", 0, json=_order(ticket, "retry", preview=True))
        return "outcome" in told

    until(is_so, 30, f"{ticket} waits for its next attempt")


def _order(ticket: str, order: str, **more: Any) -> dict[str, Any]:
    return {"ticket_id": ticket, "order": order, **more}


def usher(crew: Crew, *words: str, code: int = 0) -> str:
    """A command, in this process: twenty programs would take their time."""
    environ = {**dict.fromkeys((name for name in os.environ if name.startswith("USHER_")), None), **crew._environ}
    done = CliRunner().invoke(usher_command, [*words], env=environ)
    assert done.exit_code == code, (words, done.output, done.exception)
    return done.output
