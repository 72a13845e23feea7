"""Liveness and hygiene: recovery within the stated bound, quiescence, no leaks, and that the faults did bite."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from .history import NEVER, History, Record

_S = 1_000_000_000
#: Connections and HTTP threads come as they are needed, up to so many beyond the start.
_MORE_FILES, _MORE_THREADS = 50, 30


@dataclass
class Recoveries:
    """How long faults were felt: seconds per affected ticket (a consumer) or per fault (the service), and those that
    took too long."""

    seconds: list[float] = field(default_factory=list)
    bound_s: float = 0.0
    late: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, history: History) -> Recoveries:
        found = cls()
        for fault in history.of("fault"):
            if fault.get("recover") == "tickets":
                found._tickets(history, fault)
            elif fault.get("recover") == "service":
                found._service(history, fault)
        return found

    def at(self, part: float) -> float:
        """A percentile of the recovery times, in seconds; 0.0 without any."""
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else 0.0

    def _tickets(self, history: History, fault: Record) -> None:
        """L1: each ticket that the process was at work on, with more of it waiting, has its next effect in time."""
        since = fault["since"]
        for ticket, runs in history.by_ticket.items():
            before = [run for run in runs if run.start < fault["t0"]]
            if not before or before[-1].who != fault["who"]:
                continue
            if not _waits(history, ticket, fault["t0"]) or _has_dead_letters(history, ticket):
                continue
            following = [commit["t"] for commit in history.commits_of.get(ticket, ()) if commit["t"] > fault["t0"]]
            self._note(history, fault, min(following, default=NEVER) - since, f"ticket {ticket}")

    def _service(self, history: History, fault: Record) -> None:
        """L1: something that came after the fault is started in time."""
        since = fault["since"]
        starts = [
            run.start for run in history.executions if run.start > since and history.arrivals.get(run.uid, 0) > since
        ]
        if not starts and all(arrival <= since for arrival in history.arrivals.values()):
            return  # nothing came any more
        self._note(history, fault, min(starts, default=NEVER) - since, "the service")

    def _note(self, history: History, fault: Record, took: int, what: str) -> None:
        self.bound_s = max(self.bound_s, fault["bound_ns"] / _S)
        self.seconds.append(max(0, took) / _S)
        if took > _allowed(history, fault) - fault["since"]:
            after = f"{took / _S:.2f} s" if took < NEVER // 2 else "never"
            cause = f"{fault['kind']} of {fault['who'] or 'redis'}"
            self.late.append(f"{what} went on {after} after {cause}; the bound is {fault['bound_ns'] / _S:.2f} s")


def _allowed(history: History, fault: Record) -> int:
    """When the fault must be over. One that begins before that extends it, and so does a machine that did not let us
    run."""
    until: int = fault["since"] + fault["bound_ns"]
    waited: Counter[str] = Counter()
    for stall in history.of("stall"):
        if fault["t0"] <= stall["t0"] < until and stall["who"] != fault["who"]:
            waited[stall["who"]] += stall["t1"] - stall["t0"]
    until += max(waited.values(), default=0)
    others = sorted(
        (r for r in history.of("fault") if r is not fault and r.get("bound_ns") and r["t1"] > fault["t0"]),
        key=lambda r: int(r["t0"]),
    )
    for other in others:
        if other["t0"] < until:
            until = max(until, other["since"] + other["bound_ns"])
    return until


def _waits(history: History, ticket: str, t: int) -> bool:
    """Whether a message of the ticket had arrived at ``t`` and had no effect yet."""
    return any(
        history.arrivals.get(commit["uid"], NEVER) < t < commit["t"] for commit in history.commits_of.get(ticket, ())
    )


def _has_dead_letters(history: History, ticket: str) -> bool:
    return any(uid in history.dead for uid in history.uids_of.get(ticket, ()))


def liveness(history: History) -> Iterator[tuple[str, str]]:
    """L2: when the faults are over, all is done in bounded time."""
    final = history.final
    if not final:
        yield "L2", "the run has no final state"
        return
    if final["pel"] or final["lag"]:
        yield "L2", f"not quiet at the end: {final['pel']} pending, {final['lag']} not read"
    elif final["quiet_ns"] > history.terms["drain_ns"]:
        yield "L2", f"quiet after {final['quiet_ns'] / _S:.1f} s; the bound is {history.terms['drain_ns'] / _S:.1f} s"
    running = [run for run in history.executions if run.end >= NEVER]
    for run in running[:5]:
        yield "L2", f"{run.uid} of {run.ticket} never ended ({run.who})"


def leaks(history: History) -> Iterator[str]:
    """Q1: at quiescence nothing is left but what must be there."""
    final = history.final
    for name in ("tickets", "attempts"):
        if final.get(name):
            yield f"{final[name]} records are left in {name}"
    strangers = sorted(set(final.get("members", ())) - set(final.get("live", ())) - {"master", "halted"})
    if strangers:
        yield f"the group has members that do not live: {strangers[:5]}"
    for who, files, threads, files_now, threads_now in final.get("held", ()):
        if files_now > files + _MORE_FILES or threads_now > threads + _MORE_THREADS:
            yield f"{who} has {files_now} open files, {threads_now} threads; at the start {files}, {threads}"
    if final.get("keys"):
        yield f"keys that should not be there: {sorted(final['keys'])[:5]}"


def vacuity(history: History, figures: Mapping[str, int]) -> Iterator[str]:
    """V: a run in which the fault did not bite shows nothing."""
    for name in history.terms["must"]:
        if not figures.get(name):
            yield f"{name} is 0: the fault did not bite"
