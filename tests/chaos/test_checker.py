"""The checker judged: valid histories raise no alarm, broken ones are all caught by the rule that they break."""

from __future__ import annotations

import ast
import json
import random
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.chaos.checker.history import History
from tests.chaos.checker.safety import attempts
from tests.chaos.checker.talk import talked
from tests.chaos.checker.verdict import judge
from tests.chaos.model import Model
from tests.chaos.mutations import MUTATIONS, broken

_HISTORIES = 60
_TRIES = 2
_MUTATED = 20
_CHECKER = Path(__file__).parent / "checker"


@pytest.fixture(scope="module")
def valid() -> list[Model]:
    return [Model(seed) for seed in range(_HISTORIES)]


def test_valid_histories_raise_no_alarm(valid: list[Model]) -> None:
    for seed, model in enumerate(valid):
        verdict = judge(History(model.records))
        assert verdict.ok, f"seed {seed}:\n{verdict.told()}"


def test_the_valid_histories_have_something_in_them(valid: list[Model]) -> None:
    seen: Counter[str] = Counter()
    for model in valid:
        seen.update(judge(History(model.records)).figures)
    names = "messages redelivered zombies fenced deaths dlq unknown_sends refused_sends double_sends"
    for name in names.split():
        assert seen[name] > 10, f"{name}: {seen[name]}"


def test_every_mutation_is_caught(valid: list[Model], chaos_report: list[str]) -> None:
    caught: Counter[str] = Counter()
    tried: Counter[str] = Counter()
    for seed, model in enumerate(valid[:_MUTATED]):
        rng = random.Random(seed)
        for name, (_, rules) in MUTATIONS.items():
            for _ in range(_TRIES):
                records = broken(model.records, name, rng)
                if records is None:
                    continue
                tried[name] += 1
                found = set(judge(History(records)).rules)
                assert found & rules, f"seed {seed}: {name} was not noticed by {sorted(rules)} (found: {sorted(found)})"
                caught[name] += 1
    missing = [name for name in MUTATIONS if not tried[name]]
    assert not missing, f"no history could be broken by {missing}"
    mutated = f"{sum(tried.values())} mutated ones of {len(MUTATIONS)} kinds, {sum(caught.values())} caught"
    chaos_report.append(f"checker: {len(valid)} valid histories, 0 false alarms; {mutated}")


def test_a_history_survives_being_written_down() -> None:
    model = Model(7)
    text = "".join(json.dumps(record) + "\n" for record in model.records)
    assert judge(History.read(text)).figures == judge(History(model.records)).figures
    assert History.read(text + '{"k": "star').by_kind.keys() == History.read(text).by_kind.keys()
    with pytest.raises(ValueError, match="line 1"):
        History.read("{no\n" + text)


def _letter_after_a_start(attempts: int, *more: dict[str, object]) -> History:
    """A message that c1 was seen to start and end once, and that is a dead letter with so many attempts."""
    seen = {"x": "x1", "uid": "u1", "ticket": "T", "tok": 1, "who": "c1/1", "mid": "5-0", "attempt": 1}
    return History(
        [
            {"k": "stream", "uid": "u1", "ticket": "T", "mid": "5-0", "t": 10},
            {"k": "start", **seen, "t": 20},
            {"k": "finish", "x": "x1", "ok": False, "t": 30},
            {"k": "dlq", "uid": "u1", "mid": "5-0", "attempts": attempts, "reason": "gave_up"},
            *more,
        ]
    )


def test_a_process_that_died_may_hide_one_start() -> None:
    hidden = {"k": "die", "who": "c2/2", "t": 40}
    start = {"k": "start", "x": "x2", "uid": "u1", "ticket": "T", "tok": 2, "who": "c2/2", "mid": "5-0", "attempt": 2}
    seen = [start | {"t": 35}, hidden]
    assert not list(attempts(_letter_after_a_start(1)))
    assert not list(attempts(_letter_after_a_start(2, hidden)))
    for too_many in (
        _letter_after_a_start(2),
        _letter_after_a_start(3, hidden),
        _letter_after_a_start(2, {**hidden, "t": 9}),  # before the message was there
        _letter_after_a_start(3, *seen),  # what it had started is seen
    ):
        assert [rule for rule, _ in attempts(too_many)] == ["S8"]


def _talk(*more: dict[str, object]) -> set[str]:
    """The rules that are broken where a run took two messages, of which one is called, and a letter, and ``more``."""
    told = {"run": "5-0", "tok": 3, "attempt": 1, "took": ["5-0", "6-0"]}
    ran = [{"k": "ran", "mid": f"{n}-0", "r": r, "into": into, "tok": 3, "attempt": 1} for n, r, into in _RAN]
    answered = {"k": "answer", "uid": "raw1", "r": "answered", "told": told, "at": []}
    streams = [{"k": "stream", "uid": uid, "mid": f"{n}-0", "ticket": "T", "t": n} for n, uid in enumerate(_UIDS, 5)]
    terms = {"k": "terms", "talks": True, "limit": 1}
    return {rule for rule, _ in talked(History([terms, *streams, *ran, _PART, answered, *more]))}


_RAN, _UIDS = [(5, "done", ""), (6, "merged", "5-0")], ["u1", "raw1", "u2"]
_PART: dict[str, object] = {"k": "answer", "uid": "raw1", "r": "part", "told": 1, "at": [3, 1, 1]}
_CALL: dict[str, object] = {"k": "call", "uid": "u1", "r": "timed_out", "t0": 0, "t1": 9 * 10**9, "told": None}
_TOLD = {"run": "5-0", "tok": 3, "attempt": 1, "took": ["5-0", "6-0"]}
_ENDED = [{"k": "start", "x": uid, "uid": uid, "ticket": "T", "tok": 3, "who": "c", "t": 1} for uid in _UIDS]
_ENDED += [{"k": "finish", "x": uid, "ok": True, "t": 10**9} for uid in _UIDS]
_LETTERS: list[dict[str, object]] = [{"k": "dlq", "uid": uid, "mid": mid} for uid, mid in [("x", "8-0"), ("y", "7-0")]]
_OVER: list[dict[str, object]] = [
    {"k": "send", "uid": "u1", "ticket": "T", "r": "ok", "t0": 0, "t1": 1},
    {"k": "send", "uid": "over", "ticket": "T", "r": "ok", "t0": 1, "t1": 2},
    {"k": "stream", "uid": "over", "mid": "9-0", "ticket": "T", "t": 2},
    {"k": "dlq", "uid": "over", "mid": "9-0", "reason": "over_limit"},
]
_LIMITED = [
    {"k": kind, "uid": f"limited{n}", "ticket": "T", "r": "ok", "t0": n, "t1": n, **more}
    for n in (1, 2)
    for kind, more in [
        ("send", {}),
        ("start", {"x": n, "tok": 1, "who": "c", "t": 5}),
        ("finish", {"x": n, "ok": True, "t": 9}),
    ]
]


@pytest.mark.parametrize(
    ("rule", "records"),
    [
        ("T1", [{"k": "dlq", "uid": "u1", "mid": "5-0"}]),
        ("T1", [{"k": "ran", "mid": "6-0", "r": "done", "into": "", "tok": 4, "attempt": 1}]),
        ("T1", _LETTERS),
        ("T2", [_CALL | {"r": "answered", "told": _TOLD | {"tok": 2}}]),
        ("T2", [_CALL | {"r": "answered", "told": _TOLD | {"took": ["5-0"]}}]),
        ("T2", [_CALL | {"r": "answered", "told": _TOLD, "uid": "u2"}]),
        ("T3", [_PART]),  # behind the answer
        ("T3", [{"k": "answer", "uid": "raw1", "r": "failed", "told": "gave_up", "at": []}]),
        ("T3", [{"k": "stream", "uid": "raw2", "mid": "9-0", "ticket": "T", "t": 9}]),
        ("T4", [_CALL, *_ENDED]),
        ("T5", _LIMITED),
        ("T6", _OVER[1:]),
        ("T6", [*_OVER, {"k": "start", "x": 1, "uid": "over", "ticket": "T", "tok": 1, "who": "c", "t": 3}]),
        ("T6", [_OVER[0], _OVER[1] | {"t0": 10 * 10**9}, *_OVER[2:], *_ENDED]),
    ],
)
def test_what_is_wrong_while_it_runs_is_caught(rule: str, records: list[dict[str, object]]) -> None:
    assert not _talk() | _talk(*_OVER)
    assert rule in _talk(*records)


def _imported(source: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").partition(".")[0])
        elif isinstance(node, ast.ImportFrom) and node.level > 1:
            found.add("." * node.level)
    return found


def test_the_checker_knows_nothing_of_what_it_judges() -> None:
    files = sorted(_CHECKER.glob("*.py"))
    assert files
    for file in files:
        strangers = _imported(file.read_text("utf-8")) - set(sys.stdlib_module_names)
        assert not strangers, f"{file.name} imports {strangers}"


def test_an_import_of_the_project_would_be_found() -> None:
    assert _imported("from usher.common.protocol.keys import Keys") == {"usher"}
    assert _imported("from ..rig import cluster") == {".."}
    assert not _imported("from .history import History") - set(sys.stdlib_module_names)
