"""Define ``usher status``: the state of the system, as a table that is refreshed, or one JSON document."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.live import Live

from usher.common.base.durations import Number, moment_text
from usher.common.base.text import span
from usher.common.redis.locate import find_local_instance
from usher.common.runtime.settings import CommonSettings, options, takes_json
from usher.master.cli.shared import configured, console, consumers_table, print_json, table, tickets_table
from usher.master.insight.status import StatusReader
from usher.master.policy.rates import rates, sample_of

_TICKETS_SHOWN = 12
_TROUBLES_SHOWN = 5


_HELP = """Show consumers, tickets in processing, lag, pending and rates. On a terminal the table refreshes; Ctrl-C ends
it.

Exit code 1 when a consumer of the `usher up` of this machine is not alive (and that is not just starting); with --json
it is 0, and `missing_consumers` names them."""


@click.command(help=_HELP)
@takes_json
@click.option(
    "--once", is_flag=True, help="Print the table once and end (the default when the output is not a terminal)."
)
@click.option(
    "--every", type=Number(min=0.1), default=1.0, show_default=True, metavar="SECONDS", help="Time between two looks."
)
@options(CommonSettings)
def status(flags: dict[str, Any], as_json: bool, once: bool, every: float) -> None:
    with configured(flags, "status") as found:
        reader = found.status
        seen = look(reader, None, found.settings)
        screen = console()
        if as_json:
            print_json(seen)
            return
        if once or not screen.is_terminal:
            screen.print(drawn(seen))
        else:
            with (
                contextlib.suppress(KeyboardInterrupt),
                Live(drawn(seen), console=screen, auto_refresh=False, screen=False) as live,
            ):
                while True:
                    time.sleep(every)
                    seen = look(reader, seen, found.settings)
                    live.update(drawn(seen), refresh=True)
            return
        sys.exit(1 if seen["missing_consumers"] and not seen["starting_since_ms"] else 0)


def _logs_of_up(settings: CommonSettings) -> tuple[dict[str, str], int]:
    """Return the log of each consumer, by name, that the `usher up` of this machine runs, if that works on the same
    Redis; and since when it is starting its programs, 0 if it has."""
    up = find_local_instance(settings.state_folder)
    if up is None or settings.redis_url not in ("", up.redis_url):
        return {}, 0
    logs = {name: str(settings.state_folder / "logs" / f"{name}.log") for name in up.consumers.split(",") if name}
    return logs, up.starting_since_ms


def look(reader: StatusReader, before: dict[str, Any] | None, settings: CommonSettings) -> dict[str, Any]:
    """Return one look. Rates are per second since ``before``, None at the first look.

    ``done`` counts the entries that the group was given and has not pending; before Redis 7.0, of those in the stream.
    ``missing_consumers``: those of the `usher up` here that are not alive, each with its log; while that is starting,
    since ``starting_since_ms``, they may still come. A consumer that ends again and again before it registers is in no
    registry: only its supervisor and its log know it.
    """
    logs, starting_since_ms = _logs_of_up(settings)
    overview = reader.overview()
    overview["done"] = max(0, sample_of(overview).done or overview["entries"] - overview["lag"] - overview["pending"])
    page = reader.tickets("0", _TICKETS_SHOWN)
    sent, done = rates([sample_of(one) for one in (before, overview) if one is not None])
    per_second = {"sent_per_second": sent, "done_per_second": done}
    overview["sources"] = reader.sources()
    consumers = reader.consumers()
    alive = {row["name"] for row in consumers if row["state"] != "lost"}
    overview["missing_consumers"] = {name: log for name, log in logs.items() if name not in alive}
    overview["starting_since_ms"] = starting_since_ms
    tickets = page["tickets"][:_TICKETS_SHOWN]
    parked = reader.parked(_TICKETS_SHOWN)[0] if overview["parked"] else []
    return overview | per_second | {"consumers": consumers, "tickets_in_processing": tickets, "tickets_parked": parked}


def drawn(seen: dict[str, Any]) -> RenderableType:
    lag = f"{seen['lag']:,}" if seen["lag_is_exact"] else f"more than {seen['lag']:,}"
    there = "" if seen["has_group"] else ": not there; the master that leads makes it"
    facts = [
        ("stream", f"{seen['stream']}  (group {seen['group']}{there})"),
        ("leader", seen["leader_url"] or "none: no master leads"),
        ("entries", f"{seen['entries']:,}  done {seen['done']:,}  unread (lag) {lag}"),
        ("pending", f"{seen['pending']:,}  of these waiting under the master {seen['parked']:,}"),
        (
            "tickets in processing",
            f"{seen['tickets']:,}  halted {seen['halted']:,}" if seen["halted"] else seen["tickets"],
        ),
        ("dead letters", f"{seen['dead_letters']:,}  (usher dead list)" if seen["dead_letters"] else 0),
    ]
    if seen["delayed"]["messages"]:
        first_ms = seen["delayed"]["first_ms"]
        when = "" if first_ms is None else f"  the first in {span(first_ms - seen['time_ms'])}"
        facts.append(("delayed", f"{seen['delayed']['messages']:,}{when}  (usher delayed list)"))
    told = seen["mishaps"]
    if told["unread_cut"]:
        facts.append(("cut unread, lost", f"{told['unread_cut']:,}  (usher doctor)"))
    if seen["behind"]:
        most = ", ".join(f"{name} {number:,}" for name, number in list(seen["behind"].items())[:5])
        facts.append(("behind", f"backlog limit reached: {most}"))
    if (loss := seen["last_loss"]) is not None:
        facts.append(("last loss", f"{moment_text(loss['ms'], 'seconds')}  {loss['text']}  (usher doctor)"))
    if seen["write_trouble"]:
        facts.insert(0, ("trouble", f"{seen['write_trouble']}  (usher doctor)"))
    if seen["sources"] is not None:
        facts += _of_sources(seen["sources"])
    if seen["rules"]:
        facts.append(("rules", f"{seen['rules']:,} hold tickets or consumers back  (usher rules)"))
    if seen["done_per_second"] is not None and seen["sent_per_second"] is not None:
        facts.append(("per second", f"sent {seen['sent_per_second']:,.0f}  done {seen['done_per_second']:,.0f}"))
    parts: list[RenderableType] = [table("Usher", ("", ""), facts), "", consumers_table(seen["consumers"])]
    if not seen["consumers"]:
        parts.append("  none is registered: start one with `usher consumer --handler module:function`")
    is_what = "is not alive"
    if seen["starting_since_ms"]:
        is_what = f"is starting, since {moment_text(seen['starting_since_ms'], 'seconds')}"
    parts += [
        f"  {name} of `usher up` {is_what}; its log may say why: {log}"
        for name, log in seen["missing_consumers"].items()
    ]
    if seen["tickets_in_processing"]:
        shown = len(seen["tickets_in_processing"])
        total = max(shown, seen["tickets"])  # counted a moment before the rows
        parts += ["", tickets_table(seen["tickets_in_processing"], f"Tickets in processing ({shown:,} of {total:,})")]
    if seen["tickets_parked"]:
        parts += ["", tickets_table(seen["tickets_parked"], "Waiting: no consumer has a message of these tickets")]
    return Group(*parts)


def _of_sources(seen: dict[str, Any]) -> list[tuple[str, object]]:
    def count(row: dict[str, Any]) -> str:
        return f"{row['lag']:,}" if row["lag_is_exact"] else f"more than {row['lag']:,}"

    shares = ", ".join(f"{master['url']} {master['shards']}" for master in seen["masters"]) or "nobody: no master runs"
    lines: list[tuple[str, object]] = [
        ("sources", f"{seen['sources']:,}  not gathered yet {count(seen)}"),
        ("gathered by", f"{shares} (shards)"),
    ]
    lines += [("  behind", f"{row['source']}  {count(row)}  ({row['master'] or 'nobody'})") for row in seen["worst"]]
    lines += [("  trouble", f"{source}: {why}") for source, why in list(seen["troubles"].items())[:_TROUBLES_SHOWN]]
    return lines
