"""While it runs: every message ends in one run, or as a letter; callers are told of that run, once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from .history import NEVER, History, Record, position
from .liveness import _S

#: So long after the end of a run its caller has the answer, where nothing goes wrong with Redis.
_TOLD_S = 2.5
#: So long after its run has ended who leads may count a message as unfinished.
_HEARD_S = 5.0
#: What a letter may say of a message that had an effect before, in a run that failed, was cut off or put off.
BY_HAND, OVER_LIMIT = ("cleared", "gave_up"), "over_limit"


def talked(history: History) -> Iterator[tuple[str, str]]:
    """T1: one run ends a message, or one letter, in order. T2: an answer tells of that run. T3: one answer, and no part
    after it. T4: who calls hears of it in time. T5: never more of a ticket than its limit.
    T6: what a rule refuses came beyond its limit, and nothing of it ran."""
    if not history.terms.get("talks"):
        return
    mids = {record["uid"]: record["mid"] for record in history.of("stream")}
    ends = _ends(history)
    groups: dict[str, list[str]] = defaultdict(list)
    for mid in sorted(ends, key=position):
        records = ends[mid]
        if len(records) + sum(letter["mid"] == mid for letter in history.of("dlq")) > 1:
            yield "T1", f"{mid} has more than one end: {records}"
        groups[records[-1]["into"] or mid].append(mid)
    yield from _letters_in_order(history)
    told: dict[str, list[Record]] = defaultdict(list)
    for record in history.of("answer") + history.of("call"):
        told[record["uid"]].append(record)
        if record["r"] == "answered" and not history.of("lost"):
            yield from _of_the_effective_run(record, mids.get(record["uid"], ""), ends, groups)
    for uid in mids:
        if uid.startswith("raw") and uid not in history.excused:
            yield from _told_once(uid, told[uid], bool(history.terms.get("redriven")))
    yield from _late(history, mids)
    yield from _over_limit(history)
    yield from _refused_by_rule(history)


def _ends(history: History) -> dict[str, list[Record]]:
    ends: dict[str, list[Record]] = defaultdict(list)
    for record in history.of("ran"):
        if record["r"] in ("done", "merged"):
            ends[record["mid"]].append(record)
    return ends


def _letters_in_order(history: History) -> Iterator[tuple[str, str]]:
    last: dict[tuple[str, bool], str] = {}  # what a rule refuses does not wait for those before it
    for letter in history.of("dlq"):
        of = history.sends.get(letter["uid"], {}).get("ticket", ""), letter.get("reason") == OVER_LIMIT
        if position(letter["mid"]) < position(last.get(of, "0-0")):
            yield "T1", f"ticket {of[0]}: the letter of {letter['mid']} came after that of {last[of]}"
        last[of] = letter["mid"]


def _of_the_effective_run(
    record: Record, mid: str, ends: dict[str, list[Record]], groups: dict[str, list[str]]
) -> Iterator[tuple[str, str]]:
    if not ends[mid]:  # the run log could not be written, or a letter says how it ended
        yield "T2", f"{record['uid']} ({mid}) was answered {record['told']}, and no run ended it"
        return
    run, value = ends[mid][-1]["into"] or mid, record["told"]
    of_run = ends[run][-1] if ends[run] else {}
    if (value["run"], value["tok"], value["attempt"]) != (run, of_run.get("tok"), of_run.get("attempt")):
        yield "T2", f"{record['uid']} ({mid}) was answered by {value}, and its run is {of_run}"
    elif value["took"] != groups[run]:
        yield "T2", f"run {run} took {value['took']}, and the run log has {groups[run]}"


def _told_once(uid: str, told: list[Record], redriven: bool) -> Iterator[tuple[str, str]]:
    letters = [at for at, record in enumerate(told[:-1]) if record["r"] == "failed"] if redriven else []
    told = (
        told[letters[-1] + 1 :] if letters else told
    )  # the answer of a letter is that of the time until it is redriven
    finals = [at for at, record in enumerate(told) if record["r"] != "part"]
    parts = [record["at"] for record in told if record["r"] == "part"]
    if len(finals) != 1:
        yield "T3", f"{uid} was answered {len(finals)} times: {told}"
    elif finals[0] != len(told) - 1:
        yield "T3", f"{uid}: a part came after its answer: {told}"
    # What Redis may have taken when its reply was lost comes again; callers know its numbers.
    new = [at for number, at in enumerate(parts) if at not in parts[:number]]
    if new != sorted(new):
        yield "T3", f"{uid}: parts of a run that is over: {parts}"


def _late(history: History, mids: dict[str, str]) -> Iterator[tuple[str, str]]:
    """T4, as far as no fault was under way: by the handler's own record of its end."""
    for record in history.of("call"):
        if record["r"] == "broken":
            yield "T4", f"{record['uid']}: {record['told']}"
        runs = [run.finish for run in history.starts_of.get(record["uid"], ()) if run.ok and run.finish is not None]
        until = max(runs, default=record["t1"]) + int(_TOLD_S * _S)
        is_dead = any(letter["uid"] == record["uid"] for letter in history.of("dlq"))
        disturbed = any(fault["t1"] > record["t0"] and fault["t0"] < record["t1"] for fault in history.of("fault"))
        if record["r"] == "timed_out" and until < record["t1"] and not (is_dead or disturbed):
            yield "T4", f"{record['uid']} ({mids.get(record['uid'])}) heard nothing of its run"


def _over_limit(history: History) -> Iterator[tuple[str, str]]:
    """T5: what had certainly come and not ended yet as another one was taken."""
    limit = history.terms["limit"]
    taken: dict[str, list[Record]] = defaultdict(list)
    for record in history.of("send"):
        if record["uid"].startswith("limited") and record["r"] == "ok" and record["uid"] not in history.dead:
            runs = history.starts_of.get(record["uid"], [])
            ended = min((run.finish for run in runs if run.finish is not None), default=0)
            waits = [one for one in taken[record["ticket"]] if one["ended"] > record["t1"]]
            if len(waits) >= limit:
                yield "T5", f"ticket {record['ticket']}: {record['uid']} came, and {len(waits)} waited: {waits}"
            taken[record["ticket"]].append({"uid": record["uid"], "ended": ended})


def _refused_by_rule(history: History) -> Iterator[tuple[str, str]]:
    """T6: so many of its ticket had come before it, and had not ended, or not long ago."""
    for ticket, uids in history.uids_of.items():
        ends: list[int] = []
        for uid in uids:
            runs = history.starts_of.get(uid, [])
            if history.dead.get(uid, {}).get("reason") != OVER_LIMIT:
                ends.append(max((run.end for run in runs), default=NEVER))
                continue
            if runs:
                yield "T6", f"ticket {ticket}: {uid} was refused by a rule, and started {len(runs)} times"
            since = history.sends[uid]["t0"] - int(_HEARD_S * _S)
            if (waiting := sum(end > since for end in ends)) < history.terms["limit"]:
                yield "T6", f"ticket {ticket}: {uid} was refused by a rule when {waiting} waited"
