"""Judge the proof from the archive (`usher audit prove`): is the run log long enough for how often it is made?"""

from __future__ import annotations

from collections.abc import Iterator

from usher.common.doctor.facts import DoctorFinding, DoctorSeverity, ProofFacts
from usher.common.protocol.stream_id import rank

#: So many times longer than the time between two runs the run log should hold.
_SPARE = 2


def judge_proof(facts: ProofFacts) -> Iterator[DoctorFinding]:
    """Yield whether the proof will have holes."""
    held = f"the run log holds {facts.held_ms / 1000:,.0f} s"
    do = "prove more often (USHER_AUDIT_PROVE_MINUTES, usher audit --schedule prove), or raise USHER_RUN_LOG_LENGTH"
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
            f"{held}, and the last proof is {facts.unproven_ms / 1000:,.0f} s old",
            "executions since then may have been cut from the log before they were archived: they will not be proven",
            do,
        )
    elif _SPARE * facts.every_ms > facts.held_ms:
        yield DoctorFinding(
            "proof",
            DoctorSeverity.WARN,
            f"{held}, and proofs are {facts.every_ms / 1000:,.0f} s apart",
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
