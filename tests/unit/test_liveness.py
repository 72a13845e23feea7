from __future__ import annotations

import pytest

from usher.master.membership.health_checker import judge


@pytest.mark.parametrize(
    ("failures", "verdict"),
    [
        ({}, ((), False)),
        ({"a:1": 0, "b:1": 4}, ((), False)),
        ({"a:1": 5, "b:1": 0}, (("a:1",), False)),
        ({"b:1": 5, "a:1": 5, "c:1": 0, "d:1": 0}, (("a:1", "b:1"), False)),
        ({"a:1": 5}, (("a:1",), False)),
        ({"a:1": 5, "b:1": 5}, ((), True)),
        ({"a:1": 5, "b:1": 5, "c:1": 5, "d:1": 0, "e:1": 0}, ((), True)),
    ],
)
def test_each_row_of_the_table(failures: dict[str, int], verdict: tuple[tuple[str, ...], bool]) -> None:
    assert judge(failures, 5) == verdict
