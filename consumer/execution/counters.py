"""What handlers did, as numbers for /metrics. The acker adds a batch at a time; whoever is asked reads."""

from __future__ import annotations

from collections.abc import Sequence

from usher.common.protocol.run_log import DONE
from usher.common.runtime.histograms import LONG_US, DurationHistogram
from usher.consumer.policy.acks import FailedAttempt, Success

#: Every so many-th execution of a batch has its waiting time looked at, the first one always.
_EVERY = 64


class HandlerCounters:
    """Counts of one consumer since its start."""

    def __init__(self) -> None:
        self.outcomes: dict[str, int] = {DONE: 0}
        self.handlers = DurationHistogram()
        self.waits = DurationHistogram(LONG_US)

    def done(self, runs: Sequence[Success]) -> None:
        """Executions that Redis has as acknowledged, or refused as stale."""
        self.outcomes[DONE] += len(runs)
        self.handlers.add([run.end_us - run.start_us for run in runs])
        self.waits.add(
            [run.start_us - 1000 * int(run.stream_id.partition(b"-")[0]) for run in runs[::_EVERY] if run.attempt == 1]
        )

    def failed(self, failures: Sequence[FailedAttempt]) -> None:
        """Executions that did not end in success."""
        for failure in failures:
            self.outcomes[failure.outcome] = self.outcomes.get(failure.outcome, 0) + 1
        self.handlers.add([failure.run.end_us - failure.run.start_us for failure in failures])
