"""Judge the proof from the archive (`usher audit prove`): is the run log long enough for how often it is made?"""

from __future__ import annotations

from collections.abc import Iterator

from usher.common.doctor.facts import DoctorFinding, DoctorSeverity, ProofFacts
from usher.common.protocol.stream_id import rank

#: So many times longer than the time between two runs the run log should hold.
_SPARE = 2
_SOONER = "prove more often (USHER_AUDIT_PROVE_MINUTES, usher audit --schedule prove), or raise USHER_RUN_LOG_LENGTH"
_FASTER = (
    "proving more often does not help: raise USHER_RUN_LOG_LENGTH, so that what each run costs, however little is new,"
    " is for more executions; if a run still takes longer than half of what the log holds, give it more cores, or Spark"
    " on a cluster (USHER_AUDIT_ENGINE=spark, USHER_AUDIT_SPARK_MASTER)"
)


def judge_proof(facts: ProofFacts) -> Iterator[DoctorFinding]:
    """Yield whether the proof will have holes."""
    held = f"the run log holds {facts.held_ms / 1000:,.0f} s"
    is_slow = _SPARE * facts.took_ms > facts.held_ms
    took = f"; it took {facts.took_ms / 1000:,.0f} s" if is_slow else ""
    do = _FASTER if is_slow else _SOONER
    if facts.unproven_ms is None:
        yield DoctorFinding(
            "proof",
            DoctorSeverity.WARN,
            f"{held}, which is all that `usher audit` looks at",
            "what was cut from the log between two audits is proven by nobody",
            "let `usher audit --schedule prove` run (the program proof), which proves all of history",
        )
    elif rank(facts.archived) < rank(facts.first):
        yield DoctorFinding(
            "proof",
            DoctorSeverity.WARN,
            f"{held}, and the last proof is {facts.unproven_ms / 1000:,.0f} s old{took}",
            "executions since then may have been cut from the log before they were archived: they will not be proven",
            do,
        )
    elif _SPARE * max(facts.every_ms, facts.took_ms) > facts.held_ms:
        yield DoctorFinding(
            "proof",
            DoctorSeverity.WARN,
            f"{held}, and proofs are {facts.every_ms / 1000:,.0f} s apart{took.replace('it took', 'the last took')}",
            "with a little more traffic executions are cut from the log before they are archived: a hole in the proof",
            do,
        )
    else:
        yield DoctorFinding(
            "proof",
            DoctorSeverity.OK,
            f"proven until {facts.unproven_ms / 1000:,.0f} s ago; {held}",
            "no execution is cut before it is archived",
        )
