"""Define ``usher dead``: look at dead letters, turn them into messages again, or throw them away."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain, islice
from typing import Any

import click

from usher.common.base.clock import wall_ms
from usher.common.base.errors import ReplyUnknown
from usher.common.base.text import escape_control, label, pluralize
from usher.common.cli.progress import progress
from usher.common.protocol.stream_id import is_id
from usher.common.runtime.settings import CommonSettings, options
from usher.master.cli.shared import (
    YES,
    caller,
    configured,
    confirm,
    console,
    fields_of,
    filters,
    fitted,
    letters_of,
    looks,
    print_json,
    shown_heads,
    shown_texts,
    stacked,
    table,
    wanted_of,
)
from usher.master.insight.formatting import moment
from usher.master.operations.action_log import FAILED, OperatorAction, chosen_letters, counted
from usher.master.operations.dead_letters import AT_ONCE, DeadLetters, LetterResult
from usher.master.policy.explain.explain import span
from usher.master.policy.letters import HALT, DeadLetter, LetterFilter, Preview, also_for

#: The outcomes of letters that were changed; all others were left as they are.
_DONE = ("resumed", "added", "released", "dropped", "done")
_MEANS = {
    "resumed": "their tickets waited for them and go on, in the order of the stream",
    "added": "new messages at the end of the stream, behind the later ones of their tickets; with their uid as it was",
    "released": "thrown away; the tickets that waited for them go on without them",
    "dropped": "thrown away",
    "done": "done, but the answer was lost on the way",
    "gone": "there is no such letter, or it is gone",
    "cut": "not done: some of their fields were too large to keep, and their entries are gone from the stream",
    "held": "not done: their tickets have an owner at the moment; try again",
}
_TRIES = 5
#: Most tickets, and seconds, for which later messages of redriven letters are looked for.
_MOST_TICKETS, _LOOK_S = 10_000, 2.0
_OVERTAKEN = (
    "went on without them, and would get them behind later messages; `usher replay --ticket TICKET --since TIME` runs"
    " the messages of one again in their order, these too: then drop its letters"
)


@click.group(
    help="Look at dead letters, redrive them, or drop them. A dead letter is a message that was given up, with the"
    " reason."
)
def dead() -> None:
    pass


@dead.command("list", help="List dead letters, the oldest first.")
@filters
@click.option(
    "--limit", type=click.IntRange(min=1, max=100_000), default=50, show_default=True, help="Most letters listed."
)
@looks
def list_letters(flags: dict[str, Any], limit: int, as_json: bool, **given: Any) -> None:
    with configured(flags, "dead") as at:
        letters = DeadLetters(at.link, at.keys)
        pages = letters.all(wanted_of(given), letters.last_id())
        found = [*islice(chain.from_iterable(pages), limit + 1)]
        more, found = len(found) > limit, found[:limit]
        rows = fields_of(at).add_to_letters([letter.row() for letter in found])
    if as_json:
        print_json({"dead_letters": rows, "more": more})
        return
    console().print(_table(found, [shown_texts(row, at.settings.shown_names) for row in rows], at.settings.shown_names))
    if more:
        click.echo(f"  more than {limit:,}: give --limit, or a filter")
    elif not found:
        click.echo("  none")


def _table(letters: Sequence[DeadLetter], shown: Sequence[list[str]], names: Sequence[str]) -> Any:
    now_ms = wall_ms()
    rows = [
        (
            letter.id.decode(errors="replace"),
            letter.ticket.decode(errors="replace"),
            *chosen,
            letter.message_id.decode(errors="replace"),
            (f"{letter.reason}: {letter.error[:80]}" if letter.error else letter.reason)
            + (f" in {letter.at}" if letter.at else ""),
            letter.attempts,
            label(letter.policy),
            span(now_ms - letter.written_ms),
        )
        for letter, chosen in zip(letters, shown, strict=True)
    ]
    columns = ("letter", "ticket", *shown_heads(names), "message", "reason", "attempts", "policy", "age")
    extras = ("message", "attempts", "policy", "age")
    return fitted("Dead letters", columns, rows, ("attempts", "age"), ("letter", *extras), extras=extras)


@dead.command(
    "show",
    help="Show one dead letter with its traceback and its message's fields. Exit code 1 when there is no such letter.",
)
@click.argument("letter_id", metavar="LETTER")
@looks
def show_letter(flags: dict[str, Any], letter_id: str, as_json: bool) -> None:
    with letters_of(flags) as letters:
        found = letters.get(_id_of(letter_id))
    if found is None:
        click.echo("null" if as_json else f"there is no dead letter {letter_id}", err=not as_json)
        sys.exit(1)
    document = found[0].whole(found[1])
    if as_json:
        print_json(document)
        return
    fields, trace = document.pop("message_fields"), document.pop("traceback")
    screen = console()
    screen.print(table("Dead letter", ("", ""), _for_people(found[0])))
    screen.print(table("Fields of the message", ("name", "value"), [(name, value[:1000]) for name, value in fields]))
    if trace:
        click.echo("".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in trace))


def _for_people(letter: DeadLetter) -> list[tuple[str, str]]:
    row = letter.row()
    named = {"fields": f"{letter.fields}{', some of them cut or missing' if letter.cut else ''}"}
    told = {
        name: named.get(name, str(value or ""))
        for name, value in row.items()
        if name != "cut" and not name.endswith("_ms")
    }
    times = {"first tried": letter.first_ms, "last tried": letter.last_ms, "given up": letter.written_ms}
    told |= {name: f"{moment(ms)} UTC" for name, ms in times.items() if ms}
    return [(name.replace("_", " "), value) for name, value in told.items() if value]


def _id_of(text: str) -> bytes:
    if not is_id(text):
        raise click.UsageError(
            f"{text!r} is not the id of a letter: it looks like 1526919030474-55, see `usher dead list`"
        )
    return text.encode()


_changes = stacked(
    click.argument("letter_ids", nargs=-1, metavar="[LETTER]..."),
    click.option(
        "--all", "everything", is_flag=True, help="All letters that match the filters; without a filter, all letters."
    ),
    filters,
    YES,
    click.option("--why", default="", metavar="TEXT", help="Why, for the action log."),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON document; needs --yes."),
    options(CommonSettings),
)


@dead.command(
    "redrive",
    help=(
        "Turn dead letters into messages again; their attempts begin anew. A halted ticket goes on with the very"
        " message it waited for, then with its later ones. All other messages go to the end of the stream, where every"
        " group of the stream gets them, also one that has handled them. Exit code 1 when some could not be redriven,"
        " 0 when no letter matches."
    ),
)
@_changes
def redrive(flags: dict[str, Any], **given: Any) -> None:
    with letters_of(flags) as letters:
        sys.exit(_change(letters, "redrive", letters.redrive, given))


@dead.command(
    "drop",
    help=(
        "Throw dead letters away for good. A halted ticket goes on without the message it waited for. Exit code 1"
        " when some could not be dropped, 0 when no letter matches."
    ),
)
@_changes
def drop(flags: dict[str, Any], **given: Any) -> None:
    with letters_of(flags) as letters:
        sys.exit(_change(letters, "drop", letters.drop, given))


def _change(
    letters: DeadLetters, what: str, step: Callable[[Sequence[bytes]], list[LetterResult]], given: dict[str, Any]
) -> int:
    ids = [_id_of(text) for text in dict.fromkeys(given["letter_ids"])]
    if bool(ids) == given["everything"]:
        raise click.UsageError(
            "give ids of letters, or --all with filters (--ticket, --reason, --error, --older-than ...)"
        )
    if ids and wanted_of(given) != LetterFilter():
        raise click.UsageError("filters go with --all, not with ids of letters; give your reason as --why")
    if given["as_json"] and not given["yes"]:
        raise click.UsageError("--json does not ask for confirmation: pass --yes too")
    by, wanted, until = caller(given["why"]), wanted_of(given), letters.last_id()
    preview, first = Preview(), dict[bytes, bytes]()  # first: of each ticket that went on, its first letter's message
    named = ([found[0]] for letter_id in ids if (found := letters.get(letter_id)) is not None)
    for page in named if ids else letters.all(wanted, until):
        preview.add(page)
        for letter in page:
            if letter.policy != HALT and what == "redrive" and (letter.ticket in first or len(first) < _MOST_TICKETS):
                first.setdefault(letter.ticket, letter.message_id)
    if not given["as_json"] and not ids and not preview.count:
        click.echo(_nothing(given))
        return 0
    if preview.count and not given["as_json"]:
        rows = [(group.count, group.reason, group.told, label(group.policy)) for group in preview.groups]
        title = f"{pluralize(preview.count, 'dead letter')} to {what}"
        console().print(table(title, ("letters", "reason", "error", "policy"), rows, numbers=("letters",)))
    others = letters.other_groups() if what == "redrive" and preview.count else []
    also = also_for(others) if preview.adds else ""
    if also and not given["as_json"]:
        click.echo(f"{preview.adds:,} will be new messages: {also}", err=True)
    overtaken, is_all = letters.overtaken(first, _LOOK_S)
    if overtaken and not given["as_json"]:
        click.echo(f"{'' if is_all else 'at least '}{pluralize(overtaken, 'ticket')} {_OVERTAKEN}", err=True)
    if preview.count:
        confirm(f"{what} {preview.count:,}?", given["yes"], given["as_json"])
    done: Counter[str] = Counter()
    code, ended = 0, FAILED
    try:
        with progress() as show:
            some = (ids[at : at + AT_ONCE] for at in range(0, len(ids), AT_ONCE))
            for batch in some if ids else ([letter.id for letter in page] for page in letters.all(wanted, until)):
                done.update(_carried_out(step, batch))
                show(what, sum(done.values()), preview.count)
        ended = ""
    except KeyboardInterrupt:
        code, ended = 130, ""
    finally:
        if done or ended:
            on = chosen_letters(ids) if ids else f"{pluralize(sum(done.values()), 'dead letter')} of a filter"
            letters.note(OperatorAction(by, what, on), counted(done.elements()) + ended)
    _print_letter_results(what, letters, preview, done, others, given["as_json"])
    return code or (1 if any(word not in _DONE for word in done) else 0)


def _nothing(given: dict[str, Any]) -> str:
    texts = {"ticket": given["ticket"], "reason": given["reason"], "error": given["error"], "id": given["message_id"]}
    ages = {"older than": given["older_than"], "younger than": given["younger_than"]}
    filters = [f"{name} {escape_control(value)}" for name, value in texts.items() if value]
    filters += [f"{name} {span(value)}" for name, value in ages.items() if value is not None]
    return f"no dead letter matches: {', '.join(filters)}" if filters else "there are no dead letters"


def _carried_out(step: Callable[[Sequence[bytes]], list[LetterResult]], ids: Sequence[bytes]) -> list[str]:
    """Return the outcomes of one batch. When the answer is lost, the same is asked again: a letter that is gone then
    was done before."""
    for number in range(_TRIES):
        try:
            words = [outcome.word for outcome in step(ids)]
            return ["done" if number and word == "gone" else word for word in words]
        except ReplyUnknown:
            if number == _TRIES - 1:
                raise
            time.sleep(0.2 * 2**number)
    raise AssertionError("not reached")


def _print_letter_results(
    what: str, letters: DeadLetters, preview: Preview, done: Counter[str], others: list[str], as_json: bool
) -> None:
    if as_json:
        names = ("reason", "error_type", "at", "policy", "count")
        groups = [{name: getattr(group, name) for name in names} for group in preview.groups]
        told = {"matched": preview.count, "outcomes": dict(done), "groups": groups}
        print_json(told | {"leader_url": letters.leader_url or None, "other_groups": others if done["added"] else []})
        return
    for word, count in done.most_common():
        click.echo(f"{count:,} {word}: {_MEANS[word]}")
    if done and what == "redrive" and not letters.leader_url:
        click.echo("no master leads at the moment: nothing moves before one does")
