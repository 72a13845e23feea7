"""The model of who owns what (README.md beside this file): with all rules there is no violation and no stuck state, and
without any one of them there is. ``pytest -m slow tests/model``: a few minutes, nearly all of it the compiler's."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++"),
]

#: How a model is compiled, by a short name.
_BUILDS = {
    "2x2": ["-DMESSAGES=2", "-DINCARNATIONS=2"],
    "2x4": ["-DMESSAGES=2", "-DINCARNATIONS=4"],
    "3x2": ["-DMESSAGES=3", "-DINCARNATIONS=2"],
    "2x4 rollback": ["-DMESSAGES=2", "-DINCARNATIONS=4", "-DROLLBACK"],
}

#: Rule -> where it is missed. What else is switched off there is the rule's stand-in.
_NEEDED = {
    "WATCH_EPOCH": "lost=1",
    "LOOK_FIRST": "leader=1",
    "NEW_EPOCH": "lost=1",
    "SAME_CONNECTION": "expire=1",
    "WATCH_FIRST": "recall=1 leader=1",
    "READ_WITH_TURN": "leader=1",
    "TAKEN_WITH_TURN": "lost=1",
    "RECORD_WITH_CLAIM": "lost=1",
    "CLAIM_THE_REST": "",
    "DROP_OLD": "setid=1",
    "REWIND": "lost=1",
    "REWIND_BY_EPOCH": "leader=2 -DROP_OLD -EXPIRY_ABORTS",
    "FENCE_STORED": "lost=1 expire=1",
    "WATCH_ALIVE": "expire=1",
    "LOOK_ALIVE": "expire=1",
    "ALIVE_FIRST": "expire=1",
    "ASK_LOST_ACK": "lost=1",
    "ALL_LISTS": "expire=1 lost=1",
    "WHOLE_TICKET": "3x2 tickets=000 expire=1 pages",
    "LEAVE_BODYLESS": "delete=1 strict",
    "NOTE_WHAT_MOVED": "delete=1 recall=1 strict",
    "NOTE_EMPTY": "delete=1 recall=1",
    "GIVE_THE_REST": "delete=1 park=1",
    "READ_EXCEPTIONS": "park=1 leader=1",
    "WATCH_CHANGES": "recall=1",
    "READ_CHANGES": "recall=1",
    "NOTE_GIVE_BACK": "recall=1",
    "NOTE_PARK": "park=1",
    "NOTE_REDRIVE": "park=1",
    "HEAR_WHEN_IDLE": "recall=1",
    "CLAIM_ONLY_NAMED": "eager",
    "ASK_LOST_REPORTS": "",
    "QUIET_FIRST": "recall=1",
    "UNTIL_SURE": "recall=1 lost=1",
    "ONCE": "recall=1 lost=1",
    "HOLD": "recall=1",
    "DROP_CLOSED": "recall=1",
    "GIVE_UNREAD": "recall=1",
    "STAND_STILL": "recall=1",
    "ALL_START_OVER": "2x4 rollback roll=1",
    "REPORT_BY_RECORD": "2x4 rollback roll=1",
    "TRIM_BY_TAKEN": "trim=1",
    "PUSH_WITH_CLAIM": "lost=1",
    "POP_WITH_CLAIM": "loose",
    "GIVE_BACK_QUEUES": "recall=1 lost=1 -READ_BOTH",
    "GIVE_BACK_IN_FRONT": "recall=1 loose",
    "SETTLE_IN_PLACE": "expire=1 loose",
    "CLAIM_QUEUED_BY_FORCE": "delname=1",
    "READ_BOTH": "delq=1 lost=1",
    "SHUT_IN_DOUBT": "delq=1 lost=1",
    "SETTLE_DEAD_ONLY": "",
    "SETTLE_NOTES": "delname=1",
    "EXCEPTION_STANDS": "park=1 delexc=1 lost=1",
    "SETTLE_UP_TO_TAKEN": "2x4 group=1 park=1",
}
#: Rules that no state within the bounds misses: kept for speed, or as a second lock on a door.
_SPARE = {"SETTLE_BY_EPOCH", "SETTLE_ANSWERS_ALL", "NOTE_DRAIN", "NOTE_REGISTER", "EXPIRY_ABORTS"}

_SOUND = [
    "lost=1 all", "leader=1", "expire=1 eager", "recall=1 leader=1", "drain=1", "park=1 delexc=1", "park=1 delname=1",
    "park=1 stray=1", "delete=1 expire=1 strict", "delete=1 recall=1 strict", "delete=1 expire=1 strict redis6",
    "delete=1 lost=1", "setid=1", "trim=1", "delq=1 lost=1", "doorbell", "3x2 tickets=000 expire=1 pages",
    "2x4 crash=1 lost=1", "2x4 group=1 park=1", "2x4 rollback roll=1",
]  # fmt: skip

Run = Callable[[str], tuple[int, str]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run the model with words as in the tables above; a build comes first, 2x2 if there is none."""
    folder = tmp_path_factory.mktemp("model")

    def compiled(build: str) -> Path:
        program = folder / build.replace(" ", "-")
        if not program.exists():
            source = Path(__file__).with_name("ownership.cpp")
            flags = ["-O2", "-std=c++17", "-Wall", "-Wextra", "-Werror", *_BUILDS[build]]
            subprocess.run(["g++", *flags, "-o", str(program), str(source)], check=True)
        return program

    def call(words: str) -> tuple[int, str]:
        build = max((name for name in _BUILDS if words.startswith(name)), key=len, default="")
        options = words.removeprefix(build).split()
        if not any(option.startswith("tickets=") for option in options):
            options.append("tickets=00")
        done = subprocess.run(
            [str(compiled(build or "2x2")), *options, "live"], capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout + done.stderr

    return call


def test_every_rule_is_in_one_table(run: Run) -> None:
    _, listed = run("rules")
    assert {line.split()[1].rstrip(":") for line in listed.splitlines()} == {*_NEEDED, *_SPARE}


@pytest.mark.parametrize("bounds", _SOUND)
def test_with_all_rules_nothing_is_violated_and_nothing_is_stuck(run: Run, bounds: str) -> None:
    code, said = run(bounds)
    assert code == 0, said
    assert "complete" in said, said
    assert "stuck: 0" in said, said


@pytest.mark.parametrize("rule", _NEEDED)
def test_without_the_rule_there_is_a_counter_example(run: Run, rule: str) -> None:
    code, said = run(f"{_NEEDED[rule]} -{rule}")
    assert code == 1, said
    assert "  >> " in said, said


@pytest.mark.parametrize("bounds", ["expire=1 leader=1", "2x4 crash=1 drain=1"])
def test_without_the_spare_rules_nothing_is_violated(run: Run, bounds: str) -> None:
    code, said = run(" ".join([bounds, *(f"-{rule}" for rule in sorted(_SPARE))]))
    assert code == 0, said
    assert "stuck: 0" in said, said
