"""Define ``usher trim``: show what no reader of the stream needs any more, and cut it with ``--apply``."""

from __future__ import annotations

import sys
from typing import Any

import click

from usher.common.base.clock import wall_ms
from usher.common.base.durations import Duration
from usher.common.base.text import escape_control, pluralize
from usher.common.cli.progress import progress
from usher.common.protocol.keys import Keys
from usher.master.cli.shared import configured, console, looks, print_json, table
from usher.master.operations.trimming import COUNTED, StillNeeded, Trimming
from usher.master.policy.trim import Cut, Nothing, Refused, RetentionFacts, RetentionRow, decide, readers, young


@click.command(
    help=(
        "Show the readers of the ticket stream, how far each one is, and which entries could go; --apply cuts them."
        " Never cut: entries that a group has unread or pending, entries behind a log consumer's checkpoint, and with"
        " --archived-only entries that are not archived. Exit code 1: a reader is lost, and nothing is cut before an"
        " operator has looked."
    )
)
@click.option("--apply", is_flag=True, help="Cut. Without this option nothing is changed.")
@click.option(
    "--archived-only",
    is_flag=True,
    help="Cut only archived entries, so nothing where no archive is kept.",
)
@click.option(
    "--keep", "keep_s", type=Duration(), metavar="DURATION", help="Keep entries younger than this, e.g. 90m, 24h, 7d."
)
@click.option(
    "--forget", metavar="NAME", help="Remove the checkpoint of a log consumer that no longer exists, and end."
)
@click.option(
    "--forget-group", metavar="NAME", help="Remove the saved position of a group that no longer exists, and end."
)
@click.option(
    "--forget-archive",
    is_flag=True,
    help="Remove the mark of `usher audit archive`, when no archive is kept any more, and end.",
)
@looks
def trim(
    flags: dict[str, Any], apply: bool, archived_only: bool, keep_s: float | None, as_json: bool, **forget: Any
) -> None:
    with configured(flags, "trim", timeout_s=30.0) as at:
        settings = at.settings
        trimming = Trimming(at.link, Keys(settings.one_stream, settings.group))
        if any(forget.values()):
            sys.exit(_forget(trimming, **forget))
        facts = trimming.facts()
        wished = [] if keep_s is None else [young(wall_ms(), keep_s)]
        decision = decide(facts, archived_only=archived_only, wished=wished)
        would = trimming.count_below(decision.floor) if isinstance(decision, Cut) else 0
        cut, trouble = 0, ""
        if apply and isinstance(decision, Cut) and would:
            cut, trouble = _cut(trimming, decision, archived_only, would)
    kept_for = readers(facts, archived_only=archived_only)
    document = _document(settings.one_stream, facts, kept_for, decision, would, cut if apply else None, trouble)
    if as_json:
        print_json(document)
    else:
        _print_trim_table(document)
    sys.exit(1 if isinstance(decision, Refused) or trouble else 0)


def _forget(trimming: Trimming, forget: str | None, forget_group: str | None, forget_archive: bool) -> int:
    found = True
    if forget_archive:
        found = trimming.forget_archive()
        click.echo("the archive is forgotten" if found else "usher: no archive is noted for this stream", err=not found)
    for name, what, do in (
        (forget, "checkpoint", trimming.forget),
        (forget_group, "saved position of group", trimming.forget_group),
    ):
        if name and do(name):
            click.echo(f"{what} {name} is forgotten: entries are no longer kept for it")
        elif name:
            found = False
            click.echo(f"usher: there is no {what} {name}; `usher trim` lists them", err=True)
    return 0 if found else 1


def _cut(trimming: Trimming, decision: Cut, archived_only: bool, would: int) -> tuple[int, str]:
    cut = 0
    with progress() as show:
        try:
            for gone in trimming.cut(decision.floor, archived_only=archived_only):
                cut += gone
                show("cutting", cut, would)
        except StillNeeded as needed:
            return cut, str(needed)
    return cut, ""


def _document(
    stream: str,
    facts: RetentionFacts,
    kept_for: list[RetentionRow],
    decision: Cut | Nothing | Refused,
    would: int,
    cut: int | None,
    trouble: str,
) -> dict[str, Any]:
    now_ms = wall_ms()
    ages_s = {name: round((now_ms - noted_ms) / 1000, 1) for name, _, noted_ms in facts.checkpoints}
    rows = [
        {"kind": one.kind, "name": one.name, "keeps_from": one.keeps_from.decode(), "why": one.why}
        | {"noted_s_ago": ages_s[one.name] if one.kind == "checkpoint" else None}
        for one in kept_for
    ]
    span = facts.span
    return {
        "stream": stream,
        "first_id": span.first.decode() if span is not None and span.first else None,
        "last_id": span.last_generated.decode() if span is not None else None,
        "readers": rows,
        "decision": type(decision).__name__.lower(),
        "floor": decision.floor.decode() if isinstance(decision, Cut) else None,
        "kept_for": f"{decision.because.kind} {decision.because.name}" if isinstance(decision, Cut) else None,
        "why": decision.why,
        "problems": list(decision.problems) if isinstance(decision, Refused) else [],
        "would_cut": would,
        "would_cut_is_exact": would < COUNTED,
        "cut": cut,
        "stopped_by": trouble or None,
    }


def _print_trim_table(told: dict[str, Any]) -> None:
    screen = console()
    ages = ("" if (age_s := row["noted_s_ago"]) is None else f"{age_s:,.0f} s ago" for row in told["readers"])
    cells = [(*list(row.values())[:4], age) for row, age in zip(told["readers"], ages, strict=True)]
    title = f"{told['stream']}: entries from {told['first_id'] or 'none'}, last id {told['last_id'] or 'none'}"
    screen.print(table(title, ("reader", "name", "keeps from", "why", "noted"), cells, ids=("keeps from",)))
    for text in (*_sentences(told), f"Stopped: {told['stopped_by']}" if told["stopped_by"] else ""):
        if text:
            screen.print(escape_control(text), markup=False, soft_wrap=True)


def _sentences(told: dict[str, Any]) -> list[str]:
    if told["decision"] == "refused":
        return ["Nothing is cut: a reader is lost.", *(f"  {problem}" for problem in told["problems"])]
    if told["decision"] == "nothing":
        return [f"Nothing may go: {told['why']}."]
    if told["cut"] is None:
        number = "" if told["would_cut_is_exact"] else "more than "
        what = f"{number}{pluralize(told['would_cut'], 'entry', 'entries')} below {told['floor']} may go"
        return [f"{what}; the rest is kept for {told['kept_for']}. --apply cuts them."]
    left = max(0, told["would_cut"] - told["cut"]) if told["would_cut_is_exact"] else 0
    rest = f"; some {left:,} below it stay until their node of the stream is over" if left else ""
    were = "was" if told["cut"] == 1 else "were"
    return [f"{pluralize(told['cut'], 'entry', 'entries')} below {told['floor']} {were} cut{rest}."]
