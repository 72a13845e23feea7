"""Counters of handler outcomes, for /metrics. The acker adds a batch at a time; any thread may read."""

from __future__ import annotations

from collections.abc import Sequence

from usher.common.protocol.run_log import DONE
from usher.common.runtime.histograms import LONG_US, DurationHistogram
from usher.consumer.policy.acks import FailedAttempt, Success

#: The waiting time is taken from the first execution of a batch, and from every so many-th after it.
_EVERY = 64


class HandlerCounters:
    """The counts of one consumer since its start."""

    def __init__(self) -> None:
        self.outcomes: dict[str, int] = {DONE: 0}
        self.handlers = DurationHistogram()
        self.waits = DurationHistogram(LONG_US)

    def done(self, runs: Sequence[Success]) -> None:
        """Count executions that Redis has acknowledged, or refused as stale."""
        self.outcomes[DONE] += len(runs)
        self.handlers.add([run.end_us - run.start_us for run in runs])
        self.waits.add(
            [run.start_us - 1000 * int(run.stream_id.partition(b"-")[0]) for run in runs[::_EVERY] if run.attempt == 1]
        )

    def failed(self, failures: Sequence[FailedAttempt]) -> None:
        """Count executions that did not end in success."""
        for failure in failures:
            self.outcomes[failure.outcome] = self.outcomes.get(failure.outcome, 0) + 1
        self.handlers.add([failure.run.end_us - failure.run.start_us for failure in failures])
