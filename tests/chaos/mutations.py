"""What can be wrong with a history: each function breaks a valid one in one way, and names the rules of which one must
notice.

A mutation returns None when the history has nothing to break in that way. The rules that need the system's own audit
records (acknowledgement ownership, the leader's commands) are seen from outside through their effects only.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

Record = dict[str, Any]
Records = list[Record]
Mutation = Callable[[Records, random.Random], Records | None]

#: Name -> (mutation, rules of which at least one must be broken by it).
MUTATIONS: dict[str, tuple[Mutation, frozenset[str]]] = {}


def _mutation(*rules: str, of: Callable[[Records, random.Random], Any] | None = None) -> Callable[[Any], Any]:
    """``of``: finds what is broken, which the mutation then gets in place of the random generator, if there is any."""

    def register(function: Any) -> Any:
        def of_found(records: Records, rng: random.Random) -> Records | None:
            found = of(records, rng) if of else rng
            return None if found is None else function(records, found)

        MUTATIONS[function.__name__] = (of_found, frozenset(rules))
        return function

    return register


def broken(records: Records, name: str, rng: random.Random) -> Records | None:
    """A copy of the history with mutation ``name`` in it."""
    written_down = json.loads(json.dumps(records))  # deepcopy takes ten times as long
    return MUTATIONS[name][0](written_down, rng)


def _of(records: Records, kind: str) -> Records:
    return [record for record in records if record["k"] == kind]


def _plain(records: Records) -> Records:
    """Commits of messages that were started once, by a process that was never paused, under a token that started more
    than one message."""
    starts = _of(records, "start")
    paused = {record["who"] for record in _of(records, "fault")}
    times = Counter(record["uid"] for record in starts)
    return [c for c in _of(records, "commit") if times[c["uid"]] == 1 and c["who"] not in paused]


def _start_of(records: Records, commit: Record) -> Record:
    return next(r for r in _of(records, "start") if r["uid"] == commit["uid"])


def _finish_of(records: Records, start: Record) -> Record:
    return next(r for r in _of(records, "finish") if r["x"] == start["x"])


def _successive(records: Records, rng: random.Random) -> tuple[Record, Record] | None:
    """Two plain commits of one ticket, the later one right after the earlier one in the stream."""
    plain = {c["uid"]: c for c in _plain(records)}
    pairs = []
    last: dict[str, Record] = {}
    for record in _of(records, "stream"):
        before = last.get(record["ticket"])
        if before is not None and before["uid"] in plain and record["uid"] in plain and before["uid"] != record["uid"]:
            pairs.append((plain[before["uid"]], plain[record["uid"]]))
        last[record["ticket"]] = record
    return rng.choice(pairs) if pairs else None


def _any(records: Records, rng: random.Random) -> Record | None:
    plain = _plain(records)
    return rng.choice(plain) if plain else None


@_mutation("S1", of=_any)
def loss(records: Records, commit: Record) -> Records | None:
    """A message that was sent has no effect and is not given up."""
    return [r for r in records if r is not commit]


@_mutation("S1", of=_any)
def loss_without_a_trace(records: Records, commit: Record) -> Records | None:
    """A message was trimmed before anybody read it."""
    start = _start_of(records, commit)
    gone = (commit, start, _finish_of(records, start))
    return [r for r in records if not any(r is g for g in gone)]


@_mutation("S6", of=_any)
def duplicate_effect(records: Records, commit: Record) -> Records | None:
    return [*records, {**commit, "n": len(records) + 1}]


@_mutation("S6")
def amount_twice(records: Records, rng: random.Random) -> Records | None:
    """An effect that was applied twice under one row."""
    accounts = _of(records, "final")[0]["accounts"]
    if not accounts:
        return None
    accounts[rng.choice(sorted(accounts))] += 1
    return records


@_mutation("S2", of=_successive)
def swapped_effects(records: Records, pair: tuple[Record, Record]) -> Records | None:
    pair[0]["n"], pair[1]["n"] = pair[1]["n"], pair[0]["n"]
    return records


@_mutation("S2b", of=_successive)
def early_start(records: Records, pair: tuple[Record, Record]) -> Records | None:
    """The next message starts before the one before it has ended."""
    first, second = _start_of(records, pair[0]), _start_of(records, pair[1])
    second["t"] = _finish_of(records, first)["t"] - 1
    return records


@_mutation("S2b", of=_successive)
def start_after_a_failure(records: Records, pair: tuple[Record, Record]) -> Records | None:
    """The next message starts although the one before it failed: acknowledged before it was done."""
    _finish_of(records, _start_of(records, pair[0]))["ok"] = False
    return records


@_mutation("S4", of=_successive)
def token_reused(records: Records, pair: tuple[Record, Record]) -> Records | None:
    """One token of a ticket for two holders."""
    first, second = _start_of(records, pair[0]), _start_of(records, pair[1])
    for record in (second, pair[1]):
        record["tok"], record["who"] = first["tok"], "another/1"
    return records


@_mutation("S4", of=_successive)
def token_falls(records: Records, pair: tuple[Record, Record]) -> Records | None:
    """A ticket comes back under a lower token."""
    second = _start_of(records, pair[1])
    for record in (second, pair[1]):
        record["tok"], record["who"] = _start_of(records, pair[0])["tok"] - 1, "another/1"
    return records


@_mutation("S4", "S3", of=_successive)
def stale_write(records: Records, pair: tuple[Record, Record]) -> Records | None:
    """The sink takes an effect under a token below one that has already written."""
    pair[1]["tok"] = pair[0]["tok"] - 1
    return records


@_mutation("S4", of=_any)
def borrowed_token(records: Records, commit: Record) -> Records | None:
    """An effect by somebody who never held the token."""
    commit["who"] = "thief/1"
    return records


@_mutation("S3", of=_any)
def overlap_under_one_token(records: Records, commit: Record) -> Records | None:
    start = _start_of(records, commit)
    twin = {**start, "x": "twin", "t": start["t"] + 1}
    return [*records, twin, {"k": "finish", "x": "twin", "ok": True, "t": start["t"] + 2}]


@_mutation("S3", of=_any)
def overlap_in_a_strict_run(records: Records, commit: Record) -> Records | None:
    """Different tokens at the same time, in a run without pauses or partitions."""
    _of(records, "terms")[0]["strict"] = True
    start = _start_of(records, commit)
    other = {**start, "x": "other", "t": start["t"] + 1, "tok": start["tok"] + 1, "who": "another/1"}
    return [*records, other, {"k": "finish", "x": "other", "ok": False, "t": start["t"] + 2}]


@_mutation("S3", of=_any)
def zombie_effect(records: Records, commit: Record) -> Records | None:
    """An effect under a lower token, after the higher one has started."""
    start = _start_of(records, commit)
    other = {**start, "x": "other", "t": commit["t"] - 1, "tok": start["tok"] + 1, "who": "another/1"}
    return [*records, other, {"k": "finish", "x": "other", "ok": False, "t": commit["t"] + 1}]


@_mutation("S0", of=_any)
def ghost_effect(records: Records, commit: Record) -> Records | None:
    return [*records, {**commit, "uid": "nobody-sent-this", "n": len(records)}]


@_mutation("S0", of=_any)
def refused_send_has_an_effect(records: Records, commit: Record) -> Records | None:
    for record in _of(records, "send"):
        if record["uid"] == commit["uid"]:
            record["r"] = "fail"
    return records


@_mutation("S0", of=_any)
def wrong_ticket(records: Records, commit: Record) -> Records | None:
    _start_of(records, commit)["ticket"] = "T-other"
    return records


@_mutation("S1b", of=_any)
def false_dead_letter(records: Records, commit: Record) -> Records | None:
    """Given up although it was started only once."""
    letter = {"k": "dlq", "uid": commit["uid"], "mid": "", "attempts": 1, "reason": "attempts_exhausted"}
    return [*(r for r in records if r is not commit), letter]


@_mutation("S1b", of=_any)
def dead_letter_and_effect(records: Records, commit: Record) -> Records | None:
    return [*records, {"k": "dlq", "uid": commit["uid"], "mid": "", "attempts": 1, "reason": "gave_up"}]


@_mutation("S1b")
def letter_twice(records: Records, rng: random.Random) -> Records | None:
    """A dead letter that was written, and written again when its answer was lost."""
    letters = _of(records, "dlq")
    return [*records, dict(rng.choice(letters))] if letters else None


@_mutation("S8")
def attempts_without_starts(records: Records, rng: random.Random) -> Records | None:
    letters = _of(records, "dlq")
    if not letters:
        return None
    rng.choice(letters)["attempts"] += 20
    return records


@_mutation("L1", of=_successive)
def slow_recovery(records: Records, pair: tuple[Record, Record]) -> Records | None:
    """A ticket waits for longer than the bound after its consumer was killed."""
    first, second = _start_of(records, pair[0]), pair[1]
    arrived = max(r["t"] for r in _of(records, "stream") if r["uid"] == second["uid"])
    if arrived > _start_of(records, second)["t"] or arrived >= second["t"] - 2:
        return None
    killed = max(arrived, pair[0]["t"], first["t"]) + 1
    later = [r for r in _of(records, "start") if r["ticket"] == first["ticket"] and r["t"] < killed]
    if later[-1]["who"] != first["who"] or any(
        r["ticket"] == first["ticket"] for r in _of(records, "send") if r["expect"] == "dlq"
    ):
        return None
    fault = {"k": "fault", "kind": "kill", "who": first["who"], "recover": "tickets", "bound_ns": 0}
    return [*records, fault | dict.fromkeys(("t0", "t1", "since"), killed)]


@_mutation("L2")
def never_quiet(records: Records, _: random.Random) -> Records | None:
    _of(records, "final")[0]["pel"] = 1
    return records


@_mutation("L2")
def quiet_too_late(records: Records, _: random.Random) -> Records | None:
    _of(records, "final")[0]["quiet_ns"] = 1 << 60
    return records


@_mutation("Q1")
def leaked_record(records: Records, _: random.Random) -> Records | None:
    _of(records, "final")[0]["tickets"] = 1
    return records


@_mutation("Q1")
def leaked_key(records: Records, _: random.Random) -> Records | None:
    _of(records, "final")[0]["keys"] = ["{s}:g:inbox:gone:1"]
    return records


@_mutation("Q1")
def leaked_member(records: Records, _: random.Random) -> Records | None:
    _of(records, "final")[0]["members"].append("gone:1")
    return records


@_mutation("Q1")
def leaked_files(records: Records, _: random.Random) -> Records | None:
    _of(records, "final")[0]["held"] = [("m1/1", 20, 10, 400, 10)]
    return records


@_mutation("V")
def nothing_happened(records: Records, _: random.Random) -> Records | None:
    _of(records, "terms")[0]["must"] = ["leader_changes"]
    return records
