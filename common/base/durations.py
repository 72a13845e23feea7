"""Durations and moments as people write them on the command line."""

from __future__ import annotations

import datetime
import math
import re
from typing import Any

import click

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def duration_s(text: str) -> float:
    """Convert ``90m``, ``1.5h``, ``7d`` or ``30s`` to seconds. Raises click.BadParameter.

    >>> duration_s("1.5h")
    5400.0
    """
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]+)?)([smhd])", text.strip())
    if found is None:
        raise click.BadParameter(f"{text!r} is no duration; write e.g. 90m, 24h or 7d")
    return float(found[1]) * _UNITS_S[found[2]]


class Number(click.FloatRange):
    """A number in a range. Every range of click's contains ``nan``, and one without an end ``inf``: a rule with such a
    rate cannot be read again, and an unreadable rule pauses everything."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a number", param, ctx)
        return number


class Duration(click.ParamType):
    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        return value if isinstance(value, float) else duration_s(str(value))


class Moment(click.ParamType):
    """A moment, converted to milliseconds since the epoch; local time unless it names an offset."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return int(datetime.datetime.fromisoformat(value).timestamp() * 1000)
        except (ValueError, OverflowError):
            self.fail(
                f"{value!r} is no time: write e.g. 2026-11-21T10:00 (local) or 2026-11-21T10:00+00:00", param, ctx
            )


def moment_text(at_ms: int, precision: str) -> str:
    """Format milliseconds since the epoch as local time in ISO form; "?" for a number that is no time, which a stream
    id chosen by a producer may hold."""
    try:
        return datetime.datetime.fromtimestamp(at_ms / 1000).astimezone().isoformat(timespec=precision)
    except (OverflowError, ValueError, OSError):
        return "?"
