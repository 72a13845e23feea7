"""One run of a plan: start, break, wait, judge; and its line in the table."""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.chaos.checker.verdict import Verdict, Violation, judge
from tests.chaos.plans.plan import Plan
from tests.chaos.rig.cluster import HANDLER, Cluster, Shape

#: Tries until a fault bites, and what is added to the seed for the next one.
_TRIES, _OTHER_SEED = 3, 1000
#: From so many runs on, what happens often must have happened.
_MANY_RUNS = 10

HEADER = (
    f"{'':5}{'scenario':32}{'runs':>4} {'messages':>8} {'starts':>7} {'again':>6} {'zombies':>7} {'fenced':>6}"
    f" {'refused':>7} {'leaders':>7} {'recovery p50/p99/max (bound) s':>31} {'violations':>10} {'seconds':>7}"
)


@dataclass
class Outcome:
    """What became of the runs of one plan."""

    plan: Plan
    figures: Counter[str] = field(default_factory=Counter)
    recoveries: list[float] = field(default_factory=list)
    bound_s: float = 0.0
    violations: list[Violation] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    runs: int = 0
    seconds: float = 0.0

    def add(self, verdict: Verdict, seconds: float) -> None:
        self.figures.update(verdict.figures)
        self.recoveries = sorted(self.recoveries + verdict.recoveries.seconds)
        self.bound_s = max(self.bound_s, verdict.recoveries.bound_s)
        self.violations += verdict.violations
        self.runs += 1
        self.seconds += seconds

    def line(self) -> str:
        """Its line under ``HEADER``, and the counters that had to be above zero."""
        f = self.figures
        recovery = "-"
        if self.recoveries:
            p50, p99 = (
                self.recoveries[min(len(self.recoveries) - 1, int(part * len(self.recoveries)))] for part in (0.5, 0.99)
            )
            recovery = f"{p50:.2f}/{p99:.2f}/{self.recoveries[-1]:.2f} ({self.bound_s:.1f})"
        told = (
            f"{self.plan.name:5}{self.plan.title:32}{self.runs:4} {f['messages']:8} {f['executions']:7}"
            f" {f['redelivered']:6} {f['zombies']:7} {f['fenced']:6} {f['refused']:7} {f['leader_changes']:7}"
            f" {recovery:>31} {len(self.violations):10} {self.seconds:7.1f}"
        )
        return told + "   " + " ".join(f"{name}={f[name]}" for name in (*self.plan.must, *self.plan.often))


def varied(plan: Plan, seed: int) -> Shape:
    """The plan's shape; from the second seed on with other settings of the consumers and masters, so that runs do not
    repeat each other."""
    rng = random.Random(seed)
    if seed == 1 or not plan.varies:
        return plan.shape
    environ = {
        "USHER_ACK_MODE": rng.choice(("pipelined", "pipelined", "strict")),
        "USHER_CAPACITY": rng.choice(("12", "60", "2000")),
        "USHER_HANDLER": rng.choice((HANDLER, HANDLER, f"{HANDLER}_async")),
    }
    tuned = {
        "TICKET_WINDOW": rng.choice((2, 8, 512)),
        "BATCH": rng.choice((3, 50, 1000)),
        "FLUSH_S": rng.choice((0, 0.005, 0.02)),
    }
    return replace(plan.shape, environ={**environ, **plan.shape.environ}, tuned={**tuned, **plan.shape.tuned})


def run(plan: Plan, seed: int, seconds: float, folder: Path, system: type[Cluster] = Cluster) -> Verdict:
    """One run in ``folder``, which is left as it is. ``system`` says which system is started."""
    with system(folder, seed, varied(plan, seed), plan.load) as cluster:
        cluster.begin()
        time.sleep(plan.warm_s)
        plan.faults(cluster, seconds)
        terms = {"strict": plan.strict, "must": list(plan.must), "plan": plan.name, "seed": seed, "tokens": plan.tokens}
        history = cluster.finish(terms, plan.drain_s, plan.gently)
        verdict = judge(history)
        verdict.violations += [
            found if isinstance(found, Violation) else Violation(plan.name, found)
            for found in plan.extra(history, cluster)
        ]
    return verdict


def run_seeds(plan: Plan, seeds: range, seconds: float, keep: str) -> Outcome:
    """Runs with all seeds. The folders of those that failed are kept, and named in ``failures``; the others go.

    A run in which the fault did not bite proves nothing: it is made again with another seed, and fails when it never
    bites.
    """
    if keep:
        Path(keep).mkdir(parents=True, exist_ok=True)
    outcome = Outcome(plan)
    for seed in seeds:
        for attempt in range(_TRIES):
            told = _one(outcome, plan, seed + attempt * _OTHER_SEED, seconds, keep, is_last=attempt == _TRIES - 1)
            if told is None:
                continue
            outcome.failures += told
            break
    if outcome.runs >= _MANY_RUNS:
        outcome.failures += [
            f"V: {name} is 0 in {outcome.runs} runs" for name in plan.often if not outcome.figures[name]
        ]
    return outcome


def _one(outcome: Outcome, plan: Plan, seed: int, seconds: float, keep: str, is_last: bool) -> list[str] | None:
    """One run, added to ``outcome``. Its failures, or None when the fault did not bite and there is another try."""
    folder = Path(tempfile.mkdtemp(prefix=f"chaos-{plan.name}-{seed}-", dir=keep or None))
    began = time.monotonic()
    try:
        verdict = run(plan, seed, max(seconds, plan.seconds), folder)
    except Exception as problem:
        raise RuntimeError(f"{plan.name}, seed {seed}: the run itself failed; its files are in {folder}") from problem
    did_not_bite = bool(verdict.violations) and all(violation.rule == "V" for violation in verdict.violations)
    if did_not_bite and not is_last:
        shutil.rmtree(folder)
        return None
    outcome.add(verdict, time.monotonic() - began)
    if verdict.ok:
        shutil.rmtree(folder)
        return []
    return [
        f"{plan.name} ({plan.title}), seed {seed}, history and logs in {folder}:\n{verdict.told()}\n{verdict.figures}"
    ]
