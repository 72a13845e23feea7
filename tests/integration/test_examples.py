"""The examples, tested as their users may test theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path

import pytest

from examples import conversation, debounce, orders, sinks
from usher import Message
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


def test_events_are_validated_before_their_handlers_are_called(usher_kit: Callable[..., Kit]) -> None:
    orders.booked.clear()
    kit = usher_kit(orders.events)
    early = kit.send("42", kind="cancelled", order=42)
    kit.send("7", kind="paid", body={"order": 7, "amount": "12.50"})
    kit.send("7", kind="paid", body={"order": -7, "amount": "a lot"})
    kit.send("7", kind="sold")
    kit.run(for_s=100)
    assert orders.booked == {7: Decimal("12.50")}
    assert [(letter.reason, letter.error, letter.attempts) for letter in kit.given_up] == [
        ("invalid", "Invalid: order: Input should be greater than 0; amount: Input should be a valid decimal", 1),
        ("invalid", "Invalid: no handler is declared for kind='sold'", 1),
    ]
    assert [(call.id, call.retry_in_s) for call in kit.retried] == [(early, 60.0), (early, 60.0)]
    orders.booked[42] = Decimal(1)
    kit.run()
    assert kit.acknowledged[-1] == early
    assert 42 not in orders.booked


def test_a_handler_of_one_kind_is_called_alone() -> None:
    orders.paid(orders.Paid(order=42, amount=Decimal(1)), message("42", kind="paid"))
    assert orders.booked[42] == Decimal(1)


def test_a_conversation_answers_all_that_was_said(
    usher_kit: Callable[..., Kit], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[object] = []

    async def converse(one: Message) -> None:
        answers.append(await conversation.converse(one))

    monkeypatch.setattr(conversation, "WORD_S", 0.0)
    kit = usher_kit(converse)
    for text in ("Where is my order?", "It is number 7."):
        kit.send("chat-1", text=text)
    kit.run()
    assert answers == [{"answer": "You said: Where is my order? It is number 7.", "stopped": False}]


def test_a_burst_of_changes_is_indexed_once(usher_kit: Callable[..., Kit]) -> None:
    kit = usher_kit(debounce.index)
    for n in range(20):
        kit.send(f"doc-{n % 2}", text=f"draft {n}")
    kit.run()
    assert debounce.indexed == {"doc-0": ("draft 18", 10), "doc-1": ("draft 19", 10)}
