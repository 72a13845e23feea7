"""Safety: nothing lost, nothing out of order, one effect, tokens that only grow.

What is not visible from outside is not decided here: who was granted what without starting anything (S5), and the
leader's commands (S7).
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Iterator

from .history import NEVER, Execution, History
from .talk import BY_HAND

Finding = tuple[str, str]
#: A process that looked at its lease, was stopped, went on, and then started, may have been stopped so long before its
#: successor started.
_JUST_BEFORE_NS = 1_000_000_000


def safety(history: History) -> Iterator[Finding]:
    """(rule, counter-example) of everything that must never be."""
    yield from integrity(history)
    yield from no_loss(history)
    yield from dead_letters(history)
    if not (history.terms.get("talks") and history.of("lost")):  # what had a letter that is lost runs after all
        yield from order_of_effects(history)
        yield from order_of_starts(history)
    yield from exclusion(history)
    if history.terms["tokens"]:
        yield from tokens(history)
    yield from effects_once(history)
    yield from attempts(history)


def integrity(history: History) -> Iterator[Finding]:
    """S0: nothing comes out that was not sent; nothing that was refused comes out."""
    sends = history.sends
    for where, uids in (
        ("started", set(history.starts_of)),
        ("committed", history.committed),
        ("dead-lettered", set(history.dead)),
    ):
        for uid in sorted(uids):
            if uid not in sends:
                yield "S0", f"{uid} was {where} but never sent"
            elif sends[uid]["r"] == "fail":
                yield "S0", f"{uid} was {where} although its send was refused"
    for uid, runs in history.starts_of.items():
        for run in runs:
            if uid in sends and run.ticket != sends[uid]["ticket"]:
                yield "S0", f"{uid} of ticket {sends[uid]['ticket']} was started as {run.ticket}"


def no_loss(history: History) -> Iterator[Finding]:
    """S1: what Redis accepted ends in an effect or in the dead letters."""
    for uid, send in history.sends.items():
        accepted = send["r"] == "ok" or (send["r"] == "info" and uid in history.positions)
        if accepted and uid not in history.committed and uid not in history.dead and uid not in history.excused:
            runs = history.starts_of.get(uid, [])
            place = "was not even in the stream" if uid not in history.positions else f"was started {len(runs)} times"
            yield "S1", f"{uid} of {send['ticket']} is lost: {place}, {[(r.who, r.tok, r.ok) for r in runs[-3:]]}"


def dead_letters(history: History) -> Iterator[Finding]:
    """S1b: a dead letter has no effect, and was tried as often as it may be; what must be given up is given up, and
    once."""
    most = history.terms["max_attempts"]
    for uid, letter in history.dead.items():
        expect = history.sends.get(uid, {}).get("expect", "effect")
        if uid in history.committed and uid not in history.excused and letter["reason"] not in BY_HAND:
            yield "S1b", f"{uid} has an effect and is a dead letter ({letter['reason']})"
        if expect == "effect" and uid not in history.excused and len(history.starts_of.get(uid, [])) < most:
            yield "S1b", f"{uid} is a dead letter ({letter['reason']}) after fewer than {most} starts"
    for (uid, mid), count in Counter((letter["uid"], letter["mid"]) for letter in history.of("dlq")).items():
        if count > 1:
            yield "S1b", f"{uid} ({mid}) has {count} dead letters"
    for uid, send in history.sends.items():
        if send.get("expect") == "dlq" and send["r"] == "ok" and uid not in history.dead and uid in history.committed:
            yield "S1b", f"{uid} should have been given up, and has an effect"


def order_of_effects(history: History) -> Iterator[Finding]:
    """S2: per ticket, effects are in stream order."""
    last: dict[str, tuple[tuple[int, int], str]] = {}
    for commit in history.commits:
        at = history.positions.get(commit["uid"])
        if at is None:
            continue  # a message that the tail did not see before it was lost or deleted
        before = last.get(commit["ticket"])
        if before is not None and at < before[0]:
            yield (
                "S2",
                f"ticket {commit['ticket']}: {commit['uid']} has its effect behind that of the later {before[1]}",
            )
        else:
            last[commit["ticket"]] = (at, commit["uid"])


def order_of_starts(history: History) -> Iterator[Finding]:
    """S2b: a message starts only when every earlier one of its ticket has ended well, or was given up.

    Zombies (somebody has started under a higher token) are left to S3 and S4.
    """
    for ticket, runs in history.by_ticket.items():
        first_ok: dict[str, int] = {}
        last_end: dict[str, tuple[int, int]] = {}
        for run in runs:
            if run.ok and run.finish is not None:
                first_ok[run.uid] = min(run.finish, first_ok.get(run.uid, NEVER))
            # (token, end): a zombie that fails once more after the message was given up does not count
            last_end[run.uid] = max(last_end.get(run.uid, (-1, 0)), (-1 if run.tok is None else run.tok, run.end))
        ready: dict[str, int] = {}  # uid -> when all before it had ended
        latest = 0
        for uid in history.uids_of.get(ticket, ()):
            if uid in history.excused:
                continue
            ready[uid] = latest
            if uid in history.dead:
                is_cleared = history.dead[uid].get("reason") == "cleared"  # by an owner that started nothing of it
                latest = max(latest, first_ok.get(uid, 0 if is_cleared else last_end.get(uid, (-1, 0))[1]))
            elif uid in history.committed or uid in first_ok:
                latest = max(latest, first_ok.get(uid, NEVER))
        highest = -1
        for run in runs:
            stale = run.tok is not None and run.tok < highest
            highest = max(highest, run.tok if run.tok is not None else -1)
            if not stale and run.start < ready.get(run.uid, 0):
                yield "S2b", f"ticket {ticket}: {run.uid} was started by {run.who} (token {run.tok}) before its turn"


def exclusion(history: History) -> Iterator[Finding]:
    """S3: two executions of a ticket at a time have different tokens, and the lower one commits nothing any more.
    Strict: none at a time."""
    strict = history.terms["strict"]
    for early, late in history.overlaps:
        if early.tok is None or early.tok == late.tok or (strict and not _excused_overlap(history, early)):
            told = " and ".join(f"{run.uid} (token {run.tok}, {run.who})" for run in (early, late))
            yield "S3", f"ticket {late.ticket}: {told} ran at the same time"
    for ticket, commits in history.commits_of.items():
        runs = history.by_ticket.get(ticket, [])
        starts = [run.start for run in runs]
        highest = list(itertools.accumulate((-1 if run.tok is None else run.tok for run in runs), max))
        for commit in commits:
            before = bisect.bisect_left(starts, commit["t"])
            if before and commit["tok"] is not None and highest[before - 1] > commit["tok"]:
                yield "S3", f"ticket {ticket}: {commit['uid']} has token {commit['tok']}, behind {highest[before - 1]}"


def _excused_overlap(history: History, early: Execution) -> bool:
    """The machine, not the system: the process was not scheduled for a good part of a lease."""
    return history.frozen(early.who, early.start, early.end)


def tokens(history: History) -> Iterator[Finding]:
    """S4: a token of a ticket has one holder, and holders' tokens grow, also over elections, restarts and lost
    tails."""
    holder: dict[tuple[str, int | None], str] = {}
    granted = {(run.ticket, run.tok, run.who) for run in history.executions}
    for run in history.executions:
        if holder.setdefault((run.ticket, run.tok), run.owner) != run.owner:
            yield "S4", f"ticket {run.ticket}: token {run.tok} is of {holder[(run.ticket, run.tok)]} and {run.owner}"
    for ticket, runs in history.by_ticket.items():
        highest, since = -1, 0
        for run in runs:
            tok = run.tok if run.tok is not None else -1
            if tok < highest and not history.frozen(run.who, since - _JUST_BEFORE_NS, run.start):
                yield "S4", f"ticket {ticket}: {run.who} started {run.uid} under {tok}, behind {highest}"
            if tok > highest:
                highest, since = tok, run.start
    last: dict[str, int] = {}
    for commit in history.commits:
        ticket, tok = commit["ticket"], commit["tok"]
        if tok is not None and tok < last.get(ticket, -1):
            yield "S4", f"ticket {ticket}: {commit['uid']} was committed under {tok} after {last[ticket]}"
        last[ticket] = max(tok if tok is not None else -1, last.get(ticket, -1))
        if (ticket, tok, commit["who"]) not in granted:
            yield "S4", f"ticket {ticket}: {commit['who']} started nothing under {tok}, and committed {commit['uid']}"


def effects_once(history: History) -> Iterator[Finding]:
    """S6: no message has two effects; and the sums agree, as a second opinion that looks at no uid."""
    for uid, times in Counter(commit["uid"] for commit in history.commits).items():
        if times > 1:
            yield "S6", f"{uid} has {times} effects"
    accounts = history.final.get("accounts")
    if accounts is None:
        return
    due: Counter[str] = Counter()
    for uid, send in history.sends.items():
        if uid in history.committed:
            due[send["ticket"]] += send.get("amount", 0)
    for ticket in sorted(set(due) | set(accounts)):
        if due[ticket] != accounts.get(ticket, 0):
            yield "S6", f"ticket {ticket}: the account has {accounts.get(ticket, 0)}, and {due[ticket]} are due"


def attempts(history: History) -> Iterator[Finding]:
    """S8: never more attempts than starts of the entry; and all of them, when one process made them all and did not die
    meanwhile."""
    for letter in history.of("dlq"):
        runs = [run for run in history.starts_of.get(letter["uid"], []) if run.mid == letter["mid"]]
        stored = int(letter["attempts"])
        cut = sum(run.finish is None for run in runs)
        if stored > len(runs) + _unseen_starts(history, letter["uid"]):
            yield "S8", f"{letter['uid']}: {stored} attempts are stored, it was started {len(runs)} times"
        elif (
            stored < len(runs) - cut
            and letter["reason"] == "attempts_exhausted"
            and len({run.who for run in runs}) == 1
        ):
            yield "S8", f"{letter['uid']}: {stored} attempts are stored, of {len(runs)} by one process"


def _unseen_starts(history: History, uid: str) -> int:
    """How many starts of the message there may have been of which nobody tells: a process notes a start before it calls
    the handler, and may die before the handler has written its own record. It dies once, and where it left one that is
    seen, that was the last."""
    left_seen = {run.who for run in history.starts_of.get(uid, []) if run.finish is None}
    since = history.arrivals.get(uid, 0)
    skipped = sum(record["uid"] == uid for record in history.of("skip"))
    return skipped + sum(died > since and who not in left_seen for who, died in history.deaths.items())
