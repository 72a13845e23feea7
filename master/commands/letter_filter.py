"""The options that say which dead letters are meant, for every command that is about some of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import click

from common.commands.times import Duration
from master.policy.letters import LetterFilter


class Age(Duration):
    """An age in milliseconds."""

    name = "age"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        return int(super().convert(value, param, ctx) * 1000)


#: What is said of the text and the time of a letter.
OF_LETTERS = (
    click.option("--reason", default="", metavar="TEXT", help="Only those given up for a reason that has this in it; not why you act."),
    click.option("--error", default="", metavar="TEXT", help="Only those whose error, or its type, has this in it."),
    click.option("--older-than", type=Age(), metavar="AGE", help="Only those written longer ago: 90s, 10m, 2h, 3d."),
    click.option("--younger-than", type=Age(), metavar="AGE", help="Only those written since."),
)
_REASON, _ERROR, _OLDER, _YOUNGER = OF_LETTERS
_TICKET = click.option("--ticket", metavar="ID", help="Only those of this ticket.")
_ID = click.option("--id", "message_id", metavar="ID", help="Only the one with this id, or of the message with this id.")


def filters(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: all of them."""
    for decorate in reversed((_TICKET, _REASON, _ERROR, _ID, _OLDER, _YOUNGER)):
        command = decorate(command)
    return command


def wanted_of(given: dict[str, Any]) -> LetterFilter:
    """What the options mean now."""
    now_ms = time.time_ns() // 1_000_000
    ticket, letter_id, older, younger = given["ticket"], given.get("message_id"), given["older_than"], given["younger_than"]
    return LetterFilter(
        None if ticket is None else ticket.encode("utf-8", "surrogateescape"),
        given["reason"],
        given["error"],
        None if letter_id is None else letter_id.encode("utf-8", "surrogateescape"),
        None if younger is None else now_ms - younger,
        None if older is None else now_ms - older,
    )
