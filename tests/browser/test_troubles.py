"""The troubles that somebody on call meets, one after the other on one system: what the page, explain, `usher stuck` and
health say of each has to be right. Redis that hangs or is gone, and many letters, are in test_page.py and
test_trouble.py."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from tests.browser.looking import OPERATOR, Looking, System, running_system
from tests.browser.test_delayed_and_messages import delay
from tests.commands import usher
from tests.process.crew import KEYS
from tests.process.machine import until

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def system() -> Iterator[System]:
    more = {"USHER_TENANT_FIELD": "customer", "USHER_DEAD_LETTER_POLICY": "halt", "USHER_RETRY_SECONDS": "2"}
    with running_system(50, **more) as made:
        yield made


class Trouble(NamedTuple):
    """Something that goes wrong, and patterns of what is said then: on the page, of the ``ticket``, by `usher stuck`, and
    of the master's health. ``mends``: how it ends."""

    causes: Callable[[System], Any]
    ticket: str
    page: str
    explain: str
    stuck: str
    mends: Callable[[System], Any] = lambda system: None
    health: str = "ok"


def _signal(number: int, *names: str) -> Callable[[System], None]:
    def send(system: System) -> None:
        for name in names:  # an arbiter would put another worker in the place of one that stands still
            for pid in (system.crew.processes[name].pid, system.crew.worker_of(name)):
                os.kill(pid, number)

    return send


def _restarted(system: System) -> None:
    for name in ("c1", "c2"):
        if name in system.crew.processes:
            system.crew.stop(name)
        system.consumer(name)


def _killed(system: System) -> None:
    system.send("held-1", do="work", seconds="6")
    until(lambda: _is_there(system, "held-1"), 20, "somebody has it")
    for name in ("c1", "c2"):
        system.crew.kill_both(name)
        system.crew.processes.pop(name).wait(10)


def _flood(system: System) -> None:
    rows = [("ticket_id", f"loud-{n % 300}", "do", "work", "seconds", "0.3", "customer", "loud") for n in range(3000)]
    system.link.pipeline([("XADD", KEYS.stream, "*", *row) for row in rows])
    system.send("quiet-1", do="work", seconds="0.3", customer="quiet")


def _pause(system: System) -> None:
    system.ask(
        "POST", "/rules", json={"target": "ticket", "value": "kept-1", "action": "pause", "reason": "they asked"}
    )
    system.send("kept-1", 2)


def _resume(system: System) -> None:
    [rule] = [one for one in system.ask("GET", "/rules")["rules"] if one["value"] == "kept-1"]
    system.ask("DELETE", f"/rules/{rule['id']}")


def _retried(system: System) -> None:
    (system.folder / "mended").touch()
    about = {"ticket_id": "poison-1", "order": "retry"}
    until(
        lambda: "outcome" in system.ask("POST", "/orders", json=about) or not _is_there(system, "poison-1"), 60, "done"
    )


def _is_there(system: System, ticket: str) -> bool:
    return bool(system.link.call("HEXISTS", KEYS.tickets, ticket))


def _drop(ticket: str) -> Callable[[System], Any]:
    return lambda system: system.ask("POST", "/dead-letters/drop", json={"filter": {"ticket": ticket}}, timeout=60)


def _bad_deploy(system: System) -> None:
    (system.folder / "bad").touch()
    for number in range(8):
        system.send(f"deploy-{number}", 2, do="deploy")


TROUBLES = {
    "delayed": Trouble(
        *(lambda system: delay(system, "later-1", 3600), "later-1", r"All is well[\s\S]*1 for later"),
        *(r"delayed: 1 message of the ticket is delayed, due in (59 min|1 h)", r"^nothing is stuck"),
    ),
    "planned restart": Trouble(
        _restarted, "none", r"All is well", r"idle: the ticket has nothing", r"^nothing is stuck"
    ),
    "pause": Trouble(
        *(_pause, "kept-1", r"1 trouble\b[\s\S]*kept-1 paused", r"paused: \S+ waits because the ticket is paused by"),
        *(r"^Ticket kept-1 paused: paused by \S+: they asked .*in all 2 messages wait", _resume),
    ),
    "flood": Trouble(
        *(_flood, "loud-299", r"1 trouble\b[\s\S]*tickets queued: for their turn[\s\S]*Slow or pause tenant loud"),
        r"queued: .* waits for .*behind [\d,]+ waiting messages of its tenant: about \d+ s at [\d.]+ per second",
        r"^(at least )?\d+ tickets queued: for their turn",
    ),
    "hang": Trouble(
        *(lambda system: system.send("hangs-1", 3, do="hang"), "hangs-1", r"hangs-1 handed over: on c\d"),
        *(r"running: \S+ has run on c\d for \d+ s", r"hangs-1 handed over: on c\d, since .*in all 3 messages wait"),
        lambda system: (system.folder / "mended").touch(),
    ),
    "bad deploy": Trouble(
        *(
            _bad_deploy,
            "deploy-3",
            r"1 trouble\b[\s\S]*8 tickets waiting for a try that succeeds[\s\S]*KeyError in \S+:\d+",
        ),
        *(
            r"retrying: .* 8 tickets fail alike since .*, KeyError in asked.py:\d+",
            r"^8 tickets waiting for a try .*KeyError in asked",
        ),
        lambda system: (system.folder / "bad").unlink(),
    ),
    "poison": Trouble(
        *(lambda system: system.send("poison-1", 2, do="crash"), "poison-1"),
        *(
            r"1 trouble\b[\s\S]*poison-1 retrying: its process ended while its handler ran",
            r"may end or freeze its process",
        ),
        *(r"^Ticket poison-1 retrying: its process ended while its handler ran", _retried),
    ),
    "halt": Trouble(
        *(lambda system: (system.send("halts-1", do="give up", says="no"), system.send("halts-1")), "halts-1"),
        *(r"halts-1 halted: GiveUp", r"halted: halted: \S+ became a dead letter .*waits for an operator"),
        *(r"halts-1 halted: GiveUp", _drop("halts-1")),
    ),
    "frozen consumer": Trouble(
        *(_signal(signal.SIGSTOP, "c1", "c2"), "none", r"No consumer is live|consumers? lost|not answering"),
        *(r"idle", r"no consumer is live", _signal(signal.SIGCONT, "c1", "c2")),
    ),
    "killed consumers": Trouble(
        *(_killed, "held-1", r"No consumer is live: nothing is handled"),
        *(r"(recovering|waiting|returned|handed_over): ", r"held-1|no consumer is live", _restarted),
    ),
    "frozen leader": Trouble(
        *(_signal(signal.SIGSTOP, "master-1"), "none", r"Not up to date since"),
        *(r"", r"nothing is stuck|no consumer", _signal(signal.SIGCONT, "master-1"), "no answer"),
    ),
}


def _until_calm(looking: Looking, within_s: float) -> None:
    told = looking.page.locator("main")
    try:
        until(lambda: "All is well" in told.inner_text(), within_s, "calm")
    except AssertionError:
        pytest.fail(f"not calm within {within_s} s: {told.inner_text()}")


@pytest.mark.parametrize("name", TROUBLES)
def test_what_is_said_of_a_trouble_is_right(
    looking: Looking, system: System, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    trouble, page, seen = TROUBLES[name], looking.page, list[str]()
    looking.sign_in(OPERATOR)
    _until_calm(looking, 60)
    (system.folder / "mended").unlink(missing_ok=True)
    trouble.causes(system)

    def is_right() -> bool:
        explained = system.ask("GET", f"/explain?id={trouble.ticket}")
        capsys.readouterr()
        usher("stuck", "--redis-url", system.server.url)
        told = f"{explained.get('state')}: {' '.join(explained.get('sentences', ()))}"
        health = system.ask("GET", "/health").get("status", "no answer")
        seen[:] = page.locator("body").inner_text(), told, capsys.readouterr().out, health
        wanted = (trouble.page, trouble.explain, trouble.stuck, trouble.health)
        return all(re.search(pattern, text, re.MULTILINE) for pattern, text in zip(wanted, seen, strict=True))

    try:
        until(is_right, 60, name)
    except AssertionError:
        pytest.fail("\n----\n".join((name, *seen)))
    finally:
        trouble.mends(system)
    # The page may be calm between two messages of the ticket, and the next case breaks again what this one mended.
    until(lambda: not _is_there(system, trouble.ticket), 90, "nothing of the ticket is left")
    _until_calm(looking, 90)
    looking.troubles = [one for one in looking.troubles if "status of 503" not in one and "ERR_" not in one]
