"""The same as test_protocol_machine.py, with consumers that park and an operator who redrives and drops whatever is
halted."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import rule, run_state_machine_as_test

from tests.integration.actors import ConsumerActor
from tests.integration.test_protocol_machine import ProtocolMachine
from usher.common.protocol.keys import HALTED
from usher.master.operations.shelves import DeadLetters
from usher.master.policy.letters import HALT, LetterFilter


class HaltingMachine(ProtocolMachine):
    """Every consumer parks what it gives up; only who cleans up at the end does not, for what it gives up has been
    tried often enough."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.letters = DeadLetters(self.stage.link, self.stage.keys)
        self._made = self.stage.consumer
        self.stage.consumer = self._parking  # type: ignore[method-assign]
        self._ends = False

    def _parking(self, *args: Any, **settings: Any) -> ConsumerActor:
        return self._made(*args, **settings) if self._ends else self._made(*args, **settings, policy=HALT)

    @rule(some=st.integers(0, 60), how=st.sampled_from(["redrive", "redrive", "drop"]), heard=st.booleans())
    def an_operator_ends_a_halt(self, some: int, how: str, heard: bool) -> None:
        parked = [letter for letter in self.letters.page(LetterFilter(), None, 1000).letters if letter.policy == HALT]
        if parked:
            letter = parked[some % len(parked)]
            [outcome] = getattr(self.letters, how)([letter.id])
            assert outcome.word == {"redrive": "resumed", "drop": "released"}[how]
            if how == "drop":
                self.ledger.dropped.add(letter.message_id)
        if heard:
            for master in self.masters.values():
                master.hear()

    @rule(some=st.integers(0, 60))
    def a_handler_gives_up_and_it_is_written(self, some: int) -> None:
        self.several_turns(some)
        for consumer in self.living:
            consumer.acker.policy = HALT
        self.a_consumer_reads_and_starts(some, 2, None, "")
        self.handlers_end([(some, "gives up")])
        self.a_consumer_writes(some, "ack", None)

    def delete_body(self, some: int) -> None:
        """Not of what an operator is to see: its letter would be written twice."""
        halted = self.stage.world.pending().get(HALTED, [])
        pending = [row[0] for row in self.stage.world.pending_rows()]
        if pending and pending[some % len(pending)] not in halted:
            super().delete_body(some)

    def _finish(self) -> None:
        self._ends = True
        super()._finish()

    def long_silence(self, some: int) -> None:
        """At the end, when no late command can park anything any more, everything is redriven."""
        super().long_silence(some)
        if self._ends:
            for page in self.letters.all(LetterFilter(), self.letters.last_id()):
                self.letters.redrive([letter.id for letter in page if letter.policy == HALT])
            assert HALTED not in self.stage.world.pending()


@pytest.mark.timeout(7200)
def test_the_promise_is_kept_with_tickets_that_wait_for_an_operator(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "usher.master.dispatch.stream_cursor._SAVE_POSITION_S", 0.0
    )  # a turn must not depend on the clock: examples are run again
    is_long = settings.get_current_profile_name() == "long"  # registered in tests/conftest.py
    size = settings.default if is_long else settings(max_examples=6, stateful_step_count=40)
    run_state_machine_as_test(
        lambda: HaltingMachine(redis_url),
        settings=settings(size, deadline=None, suppress_health_check=list(HealthCheck)),
    )
