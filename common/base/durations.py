"""Options, durations and moments as people write them on the command line."""

from __future__ import annotations

import datetime
import math
import os
import re
import zoneinfo
from collections.abc import Callable
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


def option(names: str, help: str, type: Any = None, default: Any = None, **more: Any) -> Callable[[Any], Any]:
    """Make an option of a command. A default is shown."""
    shown = {} if default is None else {"default": default, "show_default": True}
    return click.option(*names.split(), type=type, help=help, **shown, **more)


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
            return moment_ms(value)
        except ValueError as wrong:
            self.fail(str(wrong), param, ctx)


def moment_ms(text: str, zone_of: Callable[[], datetime.tzinfo | None] | None = None) -> int:
    """Convert a time in ISO form to milliseconds since the epoch; without an offset it is of this zone, or of this
    machine's (TZ); of one that comes twice, when clocks go back, the first. Raises ValueError, with a sentence, for
    what is no time, also where clocks go forward over it.

    >>> moment_ms("2026-10-25T02:30", lambda: zoneinfo.ZoneInfo("Europe/Berlin"))
    1792888200000
    """
    try:
        when = datetime.datetime.fromisoformat(text)
        in_zone = when
        if when.tzinfo is None:
            zone = (zone_of or _own_zone)()
            in_zone = when.replace(tzinfo=zone) if zone else when.astimezone()
        at_s = in_zone.timestamp()
        there = datetime.datetime.fromtimestamp(at_s, in_zone.tzinfo)
    except zoneinfo.ZoneInfoNotFoundError as unknown:
        raise ValueError(f"{text!r} has no offset, and TZ names a zone that is not known: {unknown}") from None
    except (ValueError, OverflowError, OSError):
        raise ValueError(
            f"{text!r} is no time: write e.g. 2026-11-21T10:00 (local) or 2026-11-21T10:00+00:00"
        ) from None
    if abs(there.replace(tzinfo=None) - when.replace(tzinfo=None)) > datetime.timedelta(seconds=1):
        raise ValueError(f"{text!r}: there is no such time here: clocks go forward over it")
    if not -12 <= (in_zone.utcoffset() or datetime.timedelta()) / datetime.timedelta(hours=1) <= 14:
        raise ValueError(f"{text!r}: there is no zone with this offset")
    return round(at_s * 1000)


def _own_zone() -> datetime.tzinfo | None:
    """Return the zone that TZ names; None for what the system knows without a name. The system itself takes the name of
    a zone that it does not know for UTC, in silence."""
    name = os.environ.get("TZ", "").removeprefix(":")
    is_rule = re.match(r"(?:[A-Za-z]{3,}|<[^>]+>)[+-]?[0-9]", name) or name.startswith("/")
    return None if is_rule or not name else zoneinfo.ZoneInfo(name)


def moment_text(at_ms: int, precision: str) -> str:
    """Format milliseconds since the epoch as local time in ISO form; "?" for a number that is no time, which a stream
    id chosen by a producer may hold."""
    try:
        return datetime.datetime.fromtimestamp(at_ms / 1000).astimezone().isoformat(timespec=precision)
    except (OverflowError, ValueError, OSError):
        return "?"
