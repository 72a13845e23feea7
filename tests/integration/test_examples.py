"""The examples, tested as their users may test theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from examples import sinks
from usher.testing import Kit, message


@pytest.fixture(autouse=True)
def _own_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("EXAMPLE_DATABASE", f"sqlite:///{tmp_path}/example.db")
    sinks.sink.cache_clear()
    sinks.create()
    yield
    sinks.sink().engine.dispose()
    sinks.sink.cache_clear()


@pytest.mark.parametrize("name", ["naive", "asks_first", "once", "once_async"])
def test_amounts_of_a_ticket_are_added_up(usher_kit: Callable[..., Kit], name: str) -> None:
    kit = usher_kit(f"examples.sinks:{name}")
    for amount in (1, 2, 3):
        kit.send("42", amount=amount)
    kit.send("7", amount="many")
    kit.run()
    assert (sinks.total("42"), sinks.total("7")) == (6, 0)
    assert len(kit.acknowledged) == 3
    assert [letter.ticket for letter in kit.given_up] == [b"7"]


@pytest.mark.parametrize(("name", "total"), [("naive", 2), ("asks_first", 1), ("once", 1)])
def test_a_repeat_counts_once_where_the_uid_is_kept(name: str, total: int) -> None:
    for _ in range(2):
        getattr(sinks, name)(message("42", amount=1, uid="order-7"))
    assert sinks.total("42") == total


def test_a_zombie_adds_nothing() -> None:
    sinks.once(message("42", amount=1, id="5-1", fence=2))
    with pytest.raises(Exception, match="fencing token"):
        sinks.once(message("42", amount=1, id="6-1", fence=1))
    assert sinks.total("42") == 1
