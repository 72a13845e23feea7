"""Tasks of the shop."""

from __future__ import annotations

from typing import Any

try:
    from django.tasks import task
except ImportError:
    from django_tasks import task

from usher import GiveUp
from usher.django import ticket

done: list[Any] = []


@task
@ticket("account")
def book(account: int, amount: str, note: str = "") -> None:
    if amount == "many":
        raise GiveUp("that is no amount")
    done.append((account, amount, note))


@task(takes_context=True)
@ticket("account")
def again(context: Any, account: int = 7) -> None:
    done.append((account, context.attempt))
    if context.attempt < 3:
        raise ValueError(f"attempt {context.attempt}")


@task
@ticket(None)
async def remind(whom: str) -> None:
    done.append(whom)


def no_task(account: int) -> None:
    done.append("never")
