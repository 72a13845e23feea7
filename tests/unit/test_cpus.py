"""Which CPU a consumer keeps to: policy.cpus, and what is said where a system cannot do that."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from usher.common.base.errors import StartRefused
from usher.consumer.lifecycle.cpu_pinning import pin_to_cpu
from usher.consumer.policy.cpus import cpu_for

CPUS = st.sets(st.integers(0, 500), min_size=1, max_size=40)


@given(CPUS)
def test_numbered_consumers_share_no_cpu_while_there_are_enough(allowed: set[int]) -> None:
    names = [f"consumer-{number}" for number in range(1, len(allowed) + 1)]
    assert [cpu_for(name, allowed) for name in names] == sorted(allowed), "the first has the first"
    assert cpu_for(f"consumer-{len(allowed) + 1}", allowed) == min(allowed), "and then from the front"


def test_the_number_is_the_one_at_the_end() -> None:
    assert [cpu_for(name, [0, 1, 2, 3]) for name in ("eu1-consumer-2", "c3", "04", "consumer-0", "host7")] == [
        1,
        2,
        3,
        3,
        2,
    ]


@pytest.mark.slow
@given(st.text(max_size=30), CPUS)
def test_any_name_has_one_of_those_that_are_allowed_and_always_the_same(name: str, allowed: set[int]) -> None:
    assert cpu_for(name, allowed) in allowed
    assert cpu_for(name, allowed) == cpu_for(name, sorted(allowed, reverse=True))


def test_a_system_that_cannot_is_told_of_with_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    with pytest.raises(StartRefused, match=r"USHER_PIN_CPU: this system cannot .* leave it off"):
        pin_to_cpu("consumer-1")


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux can")
def test_a_refusal_of_the_kernel_is_told_with_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_pid: int, _cpus: set[int]) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    with pytest.raises(StartRefused, match=r"USHER_PIN_CPU: .* CPU \d+: .*not permitted; leave it off"):
        pin_to_cpu("consumer-1")
