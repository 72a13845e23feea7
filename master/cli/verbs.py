"""Make the commands of verbs (``usher.master.verbs``). That of a shelf's verb chooses by ids or filters, shows what
would be touched, asks, does it, and counts what came of it."""

from __future__ import annotations

import functools
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, get_args, get_origin

import click

from usher.common.base.durations import Duration
from usher.common.base.errors import ReplyUnknown
from usher.common.base.text import escape_control, label, pluralize
from usher.common.cli.progress import progress
from usher.common.protocol.stream_id import is_id
from usher.common.runtime.signals import UntilSignal
from usher.master.cli.shared import (
    YES,
    caller,
    configured,
    confirm,
    console,
    looks,
    print_json,
    stacked,
    table,
    why_option,
)
from usher.master.operations.action_log import FAILED, OperatorAction, counted
from usher.master.operations.live_rules import TooManyRules
from usher.master.policy.letters import Preview
from usher.master.verbs.bulk import BulkJob
from usher.master.verbs.verbs import TICKETS, VERBS, Args, Ask, Item, Shelf, Unfit, Verb
from usher.master.verbs.view import View

_TRIES = 5
#: Rows of a preview, and sentences about what was refused; and what programs get of a group.
_SHOWN, _GROUP = 20, ("reason", "error_type", "policy", "at", "count")


def perform(view: View, name: str, args: Args, as_json: bool, /, **places: str) -> int:
    """Do a verb about one thing, and print its outcome; return the exit code."""
    try:
        outcome = VERBS[name].perform(view, args, **places)
    except (TooManyRules, Unfit) as refused:
        raise click.ClickException(str(refused)) from refused
    if as_json:
        print_json(outcome.document or None)
    else:
        click.echo(escape_control(outcome.text))
    return 1 if outcome.problem else 0


def asks(ask: type[Ask], only: Sequence[str] = ()) -> Callable[[Any], Any]:
    """Return the options of a filter, or of some of its fields."""
    told = ((name, info) for name, info in ask.model_fields.items() if info.description)
    return stacked(*(_option(name, info) for name, info in told if not only or name in only))


def _option(name: str, info: Any) -> Callable[[Any], Any]:
    kind: Any = click.STRING
    metavar = {"ticket": "ID", "id": "ID", "consumer": "NAME", "state": "STATES"}.get(name, "TEXT")
    if get_origin(info.annotation) is Literal:
        kind, metavar = click.Choice(known := get_args(info.annotation)), "|".join(filter(None, known))
    elif name.endswith("_s"):
        kind, metavar = Duration(), "AGE"
    told = {"default": info.default, "metavar": metavar or None, "help": info.description}
    return click.option(_flag(name), name, type=kind, **told)


def _flag(name: str) -> str:
    return "--kind" if name == "group" else f"--{name.removesuffix('_s').replace('_', '-')}"  # --group is a setting


def asked_of(shelf: Shelf, given: dict[str, Any]) -> Any:
    """Return the filter that options ask for. A ticket id may be any bytes, so no model reads it. Raises UsageError."""
    named = {name: given.pop(name) for name in shelf.ask.model_fields if name in given}
    if not is_id(named.get("id") or "0-0"):
        raise click.UsageError(f"--id: {named['id']!r} is no id, such as 1526919030474-55")
    try:
        shelf.meant(asked := shelf.ask.model_construct(**named), True)
    except ValueError as wrong:
        raise click.UsageError(str(wrong)) from None
    return asked


def place_command(verb: Verb) -> click.Command:
    """Return the command of a verb about one thing."""

    @looks
    @why_option()
    def act(flags: dict[str, Any], why: str, as_json: bool, fields: tuple[str, ...] = (), **places: str) -> None:
        if wrong := next((one for one in fields if "=" not in one), None):
            raise click.UsageError(f"{wrong!r} has no value: give NAME=VALUE")
        named = {"fields": dict(one.split("=", 1) for one in fields)} if fields else {}
        with configured(flags, "operator") as at:
            code = perform(at.acting(caller(why)), verb.name, verb.args(reason=why, **named), as_json, **places)
        sys.exit(code)

    if "fields" in verb.args.model_fields:
        act = click.argument("fields", nargs=-1, required=True, metavar="NAME=VALUE...")(act)
    for name in reversed(verb.places):
        act = click.argument(name)(act)
    return click.command(verb.word, help=f"{verb.help} Exit code 1 when that changes nothing.")(act)


def shelf_command(
    verb: Verb,
    extra: Callable[[Any], Any] = lambda command: command,
    args_of: Callable[[View, dict[str, Any]], Args] = lambda view, given: Args(),
    one: Callable[[View, str, dict[str, Any]], int] | None = None,
) -> click.Command:
    """Return the command of a verb of a shelf. ``extra``: options of its own, and ``args_of`` what they say; ``one``:
    does it to a single one, if that is said otherwise."""
    shelf = verb.shelf
    assert shelf is not None
    noun = shelf.noun.rpartition(" ")[2]

    @click.argument("ids", nargs=-1, metavar=f"[{noun.upper()}]...")
    @click.option("--all", "everything", is_flag=True, help="All that match the filters; without a filter, all.")
    @asks(shelf.ask)
    @extra
    @click.option("--preview", is_flag=True, help="Only say what it would do.")
    @YES
    @why_option(has_filter="reason" in shelf.ask.model_fields)
    @looks
    def act(flags: dict[str, Any], ids: tuple[str, ...], everything: bool, why: str, **given: Any) -> None:
        asked = asked_of(shelf, given)
        _check_choice(shelf, verb, ids, everything, asked)
        if given["as_json"] and not (given["yes"] or given["preview"] or (one and ids)):
            raise click.UsageError("--json does not ask: pass --yes too")
        by = caller(why)
        with configured(flags, "operator") as at:
            view = at.acting(by)
            if one is not None and len(ids) == 1:
                code = one(view, ids[0], given)
            elif given.pop("fields", None) or given.pop("grace_s", None):
                raise click.UsageError("--with and --grace go with one ticket")
            else:
                code = _act(view, verb, shelf, list(dict.fromkeys(ids)), asked, args_of, given)
        sys.exit(code)

    code = "Exit code 1 when some were left as they are, 0 when nothing matches."
    return click.command(verb.word, help=f"{verb.help} {code}")(act)


def _check_choice(shelf: Shelf, verb: Verb, ids: Sequence[str], everything: bool, asked: Ask) -> None:
    group = verb.name.partition(" ")[0]
    if ids and (everything or asked.given):
        raise click.UsageError("filters go with --all, not with ids; give your reason as --why")
    if not (ids or everything or (asked.given and shelf is TICKETS)):
        flags = ", ".join(_flag(name) for name, one in shelf.ask.model_fields.items() if one.description)
        raise click.UsageError(f"give ids (`usher {group} list`), or --all, with filters or without: {flags}")
    if wrong_id := next((one for one in ids if shelf is not TICKETS and not is_id(one)), None):
        noun = shelf.noun.rpartition(" ")[2]
        looks_like = f"it looks like 1526919030474-55, see `usher {group} list`"
        raise click.UsageError(f"{wrong_id!r} is not the id of a {noun}: {looks_like}")


def _act(
    view: View,
    verb: Verb,
    shelf: Shelf,
    ids: list[str],
    asked: Ask,
    args_of: Callable[[View, dict[str, Any]], Args],
    given: dict[str, Any],
) -> int:
    args_of(view, given)  # wrong ones end it here
    told, as_json = asked.told(""), given["as_json"]
    pages: Iterator[Sequence[Any]]
    if ids:
        preview, pages = Preview(), iter([[Item(one.encode("utf-8", "surrogateescape")) for one in ids]])
        preview.add(shelf.named(view, ids))
    else:
        wanted = shelf.meant(asked, True)
        found = shelf.dry_run(view, wanted, math.inf)
        preview, pages = found.preview, shelf.pages(view, wanted, found.until)
    nothing = f"no {shelf.noun} matches: {told}" if told else f"there are no {shelf.noun}s"
    if not as_json:
        _show_preview(view, verb, shelf, preview, "" if ids else nothing)
    job, code = BulkJob(verb, shelf, view, Args(), None, "" if ids else told, b"", preview.count), 0
    if not given["preview"] and (ids or preview.count):
        if preview.count:
            confirm(f"{verb.label.lower()}: {pluralize(preview.count, shelf.noun)}?", given["yes"], as_json)
        job.args = args_of(view, given)  # anew: the answer may have taken long
        code = _carry_out(job, pages)
    if as_json:
        groups = [{name: vars(one)[name] for name in _GROUP} for one in preview.groups]
        document = {"matched": preview.count, "outcomes": dict(job.outcomes), "groups": groups}
        others = shelf.others(view, verb.word) if job.outcomes["added"] else []
        print_json(document | {"leader_url": view.letters.leader_url or None, "other_groups": others})
        return code
    notes = [f"  {one}: {why}" for one, why in job.failures if why not in shelf.means][:_SHOWN]
    for line in (*notes, *shelf.sentences(job.outcomes.elements())):
        click.echo(escape_control(line))
    if job.outcomes and verb.word == "redrive" and not view.letters.leader_url:
        click.echo("no master leads at the moment: nothing moves before one does")
    return code


def _show_preview(view: View, verb: Verb, shelf: Shelf, preview: Preview, nothing: str) -> None:
    if not preview.count:
        click.echo(escape_control(nothing), nl=bool(nothing))
        return
    title, nouns = f"{pluralize(preview.count, shelf.noun)} to {verb.word.replace('-', ' ')}", f"{shelf.noun}s"
    rows = [(one.count, label(one.reason), one.told, label(one.policy)) for one in preview.groups[:_SHOWN]]
    heads = (nouns, shelf.grouped, "error", "policy")
    kept = [at for at in range(len(heads)) if any(row[at] for row in rows)]
    cells = [[row[at] for at in kept] for row in rows]
    console().print(table(title, [heads[at] for at in kept], cells, numbers=(nouns,)))
    for line in shelf.warns(view, verb.word, preview):
        click.echo(line, err=True)


def _carry_out(job: BulkJob, pages: Iterator[Sequence[Any]]) -> int:
    """Do it to all of these, and return the exit code."""
    ended, code = FAILED, 0
    try:
        with progress() as show, UntilSignal() as until:
            for page in pages:
                for _ in job.take(page, functools.partial(_carried_out, job.verb, until)):
                    show(job.verb.word, job.outcomes.total(), job.count)
                if job.is_over or until.came:
                    break
        ended, code = "", 130 if until.came else 0
    finally:
        if job.verb.noted and (job.outcomes or ended):
            on = job.shelf.on([*job.touched], job.args) + (f": {job.told}" if job.told else "")
            action = OperatorAction(job.view.by, job.verb.noted, on)
            job.view.action_log.note(action, counted(job.outcomes.elements()) + ended)
    return code or int(any(word not in job.shelf.good for word in job.outcomes))


def _carried_out(verb: Verb, until: UntilSignal, view: View, items: Sequence[Any], args: Args) -> list[Any]:
    """Return the results of one batch; after a signal, of none: what was done is counted. When the answer is lost, the
    same is asked again: what is gone then was done before."""
    if until.came:
        return []
    for number in range(_TRIES):
        try:
            results = list(verb.run(view, items, args))
            return [one._replace(word="done") if number and one.word == "gone" else one for one in results]
        except ReplyUnknown:
            if number == _TRIES - 1:
                raise
            time.sleep(0.2 * 2**number)
    raise AssertionError("not reached")
