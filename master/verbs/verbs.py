"""The registry of verbs, and the documents that routes answer. A verb is a function of what it acts with and of what
was asked, ``(View, Args) -> Outcome``: its route below ``/api``, its command, its form, its check of arguments and its
entry in the OpenAPI document and the reference are made of it. A later version may add fields to a document, and
removes none.

A verb of a shelf (dead letters, delayed messages, tickets) is about many things: a function ``(View, items, Args)``
that yields what came of each. Choosing by ids or by a filter, preview, confirmation, bulk job, action log and the
counts of outcomes are those of every shelf.

A bulk job is a verb about all items that a filter fits. A dry run counts them; the job goes page by page, and can be
stopped at any time. What came after the dry run is not touched: letters by their ids, tickets by those of their first
messages. What was done stays done when this master ends in between; the rest can be asked for again. When a reply is
lost, or Redis refuses, the items are read again from the first one: letters that were changed are gone, and their
outcome is not counted; a rule that was set then is replaced by itself.
"""

from __future__ import annotations

import inspect
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import thread_time
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, TypeVar

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, field_validator, model_validator
from typing_extensions import TypedDict

from usher.common.base.clock import wall_ms
from usher.common.base.errors import MessageUndecodable, ReplyUnknown, UsherError
from usher.common.base.log import event
from usher.common.base.text import pluralize, span
from usher.common.protocol.last_error import error_name
from usher.common.protocol.message import LONGEST_TICKET, check_ticket, ticket_value
from usher.common.protocol.registration import NAME
from usher.common.protocol.stream_id import is_id, rank
from usher.common.runtime.service import Service
from usher.common.runtime.settings import checked_by
from usher.common.sending.producer import LATEST_MS
from usher.master.insight.formatting import moment
from usher.master.operations.action_log import FAILED, OperatorAction, StepResult, counted
from usher.master.operations.live_rules import RuleSetChange, TooManyRules
from usher.master.operations.shelves import AT_ONCE, DROP, MOVE, SEND_NOW, DelayedRow, check_due, chosen_delayed
from usher.master.policy.letters import HALT, LetterFilter, Preview, also_for
from usher.master.policy.rules import LONGEST_REASON, Rule, RuleAction, Target, alike, rule_id
from usher.master.policy.states import LISTED, TicketFilter, parse_states
from usher.master.policy.ticket_orders import TicketOrder
from usher.master.verbs.view import OrderResult, View


def _check_ticket_id(value: str) -> None:
    if not 0 < len(value.encode("utf-8", "surrogatepass")) <= LONGEST_TICKET:
        raise ValueError(f"must be text of 1 to {LONGEST_TICKET} bytes")


def _check_stream_id(value: str) -> None:
    if not is_id(value):
        raise ValueError("must be a stream id like 1526919030474-55")


def _check_line(value: str) -> None:
    if not value.isprintable():
        raise ValueError("must be one line of text, without control characters")


#: Text for people: any markup is shown literally, and nothing can end a line or colour a terminal.
OneLine = Annotated[str, checked_by(_check_line)]
#: Any text: a ticket may have any name.
TicketId = Annotated[str, Field(min_length=1, max_length=LONGEST_TICKET), checked_by(_check_ticket_id)]
_STREAM_ID = WithJsonSchema({"type": "string", "pattern": "^[0-9]{1,20}-[0-9]{1,20}$"})
StreamId = Annotated[str, checked_by(_check_stream_id), _STREAM_ID]


class Registered(TypedDict):
    """A generation and its lease."""

    incarnation: str
    generation: int
    lease_ms: int
    left_ms: int
    ticket_window: int
    leader_url: str | None


class Deregistered(TypedDict):
    incarnation: str


class Reported(TypedDict):
    """An answer to a report: ``ok``, ``gone`` or ``stale`` for each message of each item, in its order."""

    results: list[list[str]]


class ConsumerRow(TypedDict):
    """A consumer. ``state``: live, starting, paused, draining, revoked or lost. ``silent``: it does not answer the
    leader over HTTP. ``ticket_ids``: those that it has in processing, as far as there was time to look.
    ``started_ms``: when it was registered. A name of which only pending entries are left has less. ``process``: of one
    that is asked for by its name; null when it did not say."""

    name: str
    incarnation: str
    state: str
    lease_ms: int
    pending: int
    ticket_ids: list[str]
    slots: NotRequired[int]
    capacity: NotRequired[int]
    health_url: NotRequired[str]
    started_ms: NotRequired[int]
    silent: NotRequired[bool]
    process: NotRequired[ProcessRow | None]


class Consumers(TypedDict):
    """Consumers; of one that is asked for by its name, former incarnations too that still hold entries."""

    consumers: list[ConsumerRow]


class ProcessRow(TypedDict):
    """A consumer's process, as it says itself. ``code``: changes with the handler's. ``running``: the messages whose
    handlers run, the longest first, 200 at most of ``runs``; ``stack``: where the first 20 of them stand."""

    incarnation: str
    host: str
    pid: int
    version: str
    handler: str
    code: str
    memory_bytes: int | None
    running: list[dict[str, Any]]
    runs: int


class LetterRow(TypedDict):
    """A dead letter without its traceback and its message's fields (``fields`` is their number). ``at``: file and line
    of the error, in the handler's own code; ``handler``: MODULE:FUNCTION. ``error``: its text, of which viewers see
    the type only. ``shown_fields``: see TicketRow. A letter that is asked for by its id has its ``traceback``, empty
    for viewers, and ``message_fields``: pairs of name and value; null for viewers, who may not see what messages
    say."""

    id: str
    message_id: str
    ticket_id: str
    reason: str
    error: str
    error_type: str
    at: str
    handler: str
    attempts: int
    owner: str
    first_ms: int
    last_ms: int
    written_ms: int
    policy: str
    fence: int
    fields: int
    cut: bool
    shown_fields: NotRequired[dict[str, str | None] | None]
    traceback: NotRequired[str]
    message_fields: NotRequired[list[list[str]] | None]


class ErrorRow(TypedDict):
    """The last error of a message. ``told``: its type, and its place in the handler's own code (``at``); ``error``: its
    text, for operators. ``starts`` and ``charged``: the attempts by then; ``at_ms``: when it was; ``since_ms``: the
    first failure. ``alike``: so many tickets failed alike since then, and wait, uncharged; 0: not so."""

    error: str
    error_type: str
    at: str
    told: str
    starts: int
    charged: int
    most: int
    at_ms: int
    alike: int
    since_ms: int


class TicketRow(TypedDict):
    """A ticket. ``state``: processing, retrying (its first message has failed before), recovering (its owner is lost),
    returned, put_off (given back until ``due_ms``), paused (given back, and a rule holds it: ``why``), halted,
    waiting or unreadable. ``dead_letter``: the one that a halted ticket waits for, if half a second finds it.
    ``attempts``: the starts of its first message, of which ``charged`` count against ``max_attempts``; ``last_error``:
    null if none is known. ``shown_fields``: for operators, the fields of its first message that USHER_SHOWN_FIELDS
    names, null for one that it lacks; null instead of them all if there was no time to read them. ``parked``: of one
    that is asked for by its id, how many the leader holds back; null where that is unknown."""

    ticket_id: str
    state: str
    fence: NotRequired[int]
    due_ms: NotRequired[int]
    message_ids: NotRequired[list[str]]
    consumer_name: NotRequired[str]
    owner: NotRequired[str]
    why: NotRequired[str]
    dead_letter: NotRequired[LetterRow]
    attempts: NotRequired[int]
    charged: NotRequired[int]
    max_attempts: NotRequired[int | None]
    last_error: NotRequired[ErrorRow | None]
    shown_fields: NotRequired[dict[str, str | None] | None]
    parked: NotRequired[int | None]


class Tickets(TypedDict):
    tickets: list[TicketRow]
    cursor: str | None


class FoundRow(TypedDict):
    """A message that was found. ``state``: handed_over, waiting, halted, unread or dead_letter; ``letter_id``: of a
    dead letter. ``ticket_id`` and ``message_id`` are null where they are missing or no ids."""

    message_id: str | None
    ticket_id: str | None
    letter_id: str | None
    state: str
    consumer_name: str
    shown_fields: dict[str, str | None] | None


class Found(TypedDict):
    """An answer of a search. ``looked_at``: so many entries ``of`` those that are unfinished or dead, or more unless
    ``of_is_exact``. ``cursor``: where the search goes on; null at the end."""

    messages: list[FoundRow]
    looked_at: int
    of: int
    of_is_exact: bool
    cursor: str | None


class Audit(TypedDict):
    """The last audit. ``audit``: see ``usher.master.audit.job.summary``."""

    audit: dict[str, Any] | None


class Sources(TypedDict):
    """The gathered sources. ``sources``: see ``usher.common.doctor.collector``."""

    sources: dict[str, Any] | None


class Lag(TypedDict):
    """Numbers for autoscalers. ``lag``: messages not read yet, in the sources too where several are gathered.
    ``unfinished``: lag and pending. ``takeable``: what another consumer could take now, so not what runs, or waits for
    anything but room. ``consumers``, ``slots``: of live consumers."""

    lag: int
    lag_is_exact: bool
    pending: int
    unfinished: int
    takeable: int
    oldest_seconds: float
    consumers: int
    slots: int
    time_ms: int


class Letters(TypedDict):
    """A page of dead letters. ``cursor``: where the next page begins; null at the end."""

    dead_letters: list[LetterRow]
    cursor: str | None


class ItemOutcome(TypedDict):
    """Result for an item. Of a letter: resumed, added (``message_id`` is the message made from it), released,
    dropped; or gone, cut, held. Of a delayed message: moved (also of what is to be sent now), dropped; or gone (sent or
    dropped before), held (no leader has put it in order yet), unknown (no delayed message has had this id). After the
    last three of each nothing was done."""

    id: str
    outcome: str
    message_id: NotRequired[str]


class Outcomes(TypedDict):
    """``cursor``: where the letters go on that a filter fits; ``other_groups``: those of the stream that handle what
    was added too."""

    results: list[ItemOutcome]
    cursor: str | None
    other_groups: list[str]


class ExecutionRow(TypedDict):
    """An execution that ended. ``ended_ms`` and ``took_ms`` are null where it ended with its process. ``into``: the
    message whose run absorbed this one; ``interrupted``: somebody interrupted it."""

    ticket_id: str
    began_ms: int
    ended_ms: int | None
    took_ms: float | None
    outcome: str
    attempt: int
    fence: int
    owner: str
    into: NotRequired[str]
    interrupted: NotRequired[bool]


class MessageShown(TypedDict):
    """A message. ``state``: delayed, dead_letter, over (neither pending nor in a dead letter), gone
    (not pending, and the stream does not have it any more), or that of an unfinished message (``entry``, as the
    ticket's explanation has it if it is among the first ones; ``sentences``: what it waits for, if it is the
    first). ``bytes`` and ``field_count`` are null where the stream does not have it; ``fields`` (pairs, long
    values cut) then too, and for viewers. ``executions``: oldest first, ``cursor``: where the search in the run
    log goes on; ``executions_are_cut``: the log may have had earlier ones. ``due_ms``: when it was to be
    sent, of one sent for later."""

    message_id: str
    ticket_id: str | None
    state: str
    sent_ms: int
    due_ms: int | None
    bytes: int | None
    field_count: int | None
    fields: list[list[str]] | None
    entry: dict[str, Any] | None
    sentences: list[str]
    delayed: DelayedRow | None
    dead_letter: LetterRow | None
    attempts: int
    charged: int
    last_error: ErrorRow | None
    traceback: str
    executions: list[ExecutionRow]
    cursor: str | None
    run_log_begins_ms: int | None
    executions_are_cut: bool
    replay_of: str | None
    redriven_from: str | None


class Explanation(TypedDict):
    """A ticket's explanation. See ``usher.master.policy.explain`` for all of it."""

    ticket_id: str
    state: str
    summary: str
    sentences: list[str]
    waits_for: Any
    until_ms: int | None
    entries: list[dict[str, Any]]
    attempts: int
    charged: int
    max_attempts: int | None
    last_error: ErrorRow | None
    traceback: str


class Rules(TypedDict):
    rules: list[Rule]
    version: int


class ActionRow(TypedDict):
    """An operator's action. ``via``: http or cli."""

    id: str
    time_ms: int
    who: str
    via: str
    what: str
    on: str
    why: str
    outcome: str
    version: NotRequired[int]


class Actions(TypedDict):
    actions: list[ActionRow]
    cursor: str | None


class DelayedList(TypedDict):
    """A page of delayed messages. ``cursor``: where the next page begins; null at the end. ``waiting``: all that wait,
    of which ``unsorted`` are in no list yet: no leader has put them in order. ``time_ms``: the time of Redis."""

    delayed: list[DelayedRow]
    cursor: str | None
    waiting: int
    unsorted: int
    time_ms: int


#: An outcome after which there is room for none of the other items either.
NO_ROOM = "no_room"
Reason = Annotated[OneLine, Field(max_length=LONGEST_REASON, description="Why, for the action log.")]


_MOST_IDS = 500
#: Seconds for which later messages of redriven letters are looked for.
_LOOK_S = 2.0
_NOT_EDITED = {404: "unknown_dead_letter", 409: "letter_not_sent: some of it is missing, or its ticket has an owner"}
#: The longest value of a field that a form shows to be edited, in bytes.
_LONGEST_EDITED = 20_000
_OVERTAKEN = (
    "went on without them, and would get them behind later messages; `usher replay --ticket TICKET --since TIME` runs"
    " the messages of one again in their order, these too: then drop its letters"
)

VERBS: dict[str, Verb] = {}
_Run = TypeVar("_Run", bound=Callable[..., Any])


class Given(BaseModel):
    """Input of somebody. An unknown field is refused: a misspelt one would be left out in silence."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class Args(Given):
    """Arguments of a verb."""

    reason: Reason = ""


class Ask(Given):
    """A filter of a shelf, as queries, forms and options ask for it."""

    @property
    def given(self) -> dict[str, Any]:
        return {name: value for name in type(self).model_fields if (value := getattr(self, name)) not in (None, "")}

    def told(self, everything: str) -> str:
        told = {n.replace("_", " "): span(one * 1000) if n.endswith("_s") else one for n, one in self.given.items()}
        words = (f"{name.removesuffix(' s').replace('group', 'of the kind')} {one}" for name, one in told.items())
        return ", ".join(words) or everything


class Unfit(UsherError):
    """Refusal of what cannot be: ``field`` is wrong."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(problem)
        self.field = field


class Outcome(NamedTuple):
    """Result of a verb: a document for programs, a sentence for people. ``problem``: the title of what kept it from
    being done, "" if it was; ``status``: as HTTP says it."""

    document: Mapping[str, Any]
    text: str
    status: int = 200
    problem: str = ""


class Item(NamedTuple):
    """Something on a shelf. ``group``: what it has in common with others: state, reason or ticket; error; policy;
    place. ``head``: the first unfinished message of a ticket."""

    id: bytes
    group: tuple[str, str, str, str] = ("", "", "", "")
    head: str = ""
    policy: str = HALT


class DryRun(NamedTuple):
    """Preview of a verb of a shelf. ``until``: an id above which nothing is meant; ``is_all``: there was time to
    count all."""

    preview: Preview
    until: bytes
    is_all: bool


@dataclass(frozen=True)
class Shelf:
    """A list of things that are filtered, previewed and acted on. ``path``: of its page, and below ``/api`` (``answer``
    None: not there); ``command``: the group of its commands. ``means``:
    what outcomes mean; of those in ``good`` something was done. ``grouped``: what a preview counts them by.

    ``meant``: the filter that is asked for, with whether its caller sees the texts of errors; ``until``: an id above
    which there is nothing yet; ``pages``: yields the items up to there that fit; ``named``: yields what is there of
    these ids; ``on``: describes, for the action log, what a verb was done to; ``chosen``: returns the items that
    arguments choose, and where to go on; ``others``: names the other groups that get what a verb adds to the stream;
    ``warns``: tells what will follow."""

    noun: str
    command: str
    path: str
    ask: type[Ask]
    args: type[Args]
    means: Mapping[str, str]
    good: frozenset[str]
    meant: Callable[[Any, bool], Any]
    until: Callable[[View], bytes]
    pages: Callable[[View, Any, bytes], Iterator[Sequence[Any]]]
    named: Callable[[View, Sequence[str]], Iterator[Any]]
    on: Callable[[Sequence[bytes], Any], str]
    chosen: Callable[[View, Any], tuple[Sequence[Any], str | None]]
    answer: Any = Outcomes
    grouped: str = "reason"
    at_once: int = AT_ONCE
    others: Callable[[View, str], list[str]] = lambda view, word: []
    warns: Callable[[View, str, Preview], list[str]] = lambda view, word, preview: []
    verbs: dict[str, Verb] = field(default_factory=dict)

    def verb(
        self,
        word: str,
        label: str,
        noted: str | None = None,
        *,
        is_harmful: bool = True,
        args: type[Args] | None = None,
        will: str = "",
        did: str = "",
        keeps_order: bool = False,
    ) -> Callable[[_Run], _Run]:
        """Decorate a function ``(view, items, args)`` so that it is a verb of this shelf (see ``Verb``)."""

        def add(run: _Run) -> _Run:
            route = f"POST {self.path}/{word}" if self.answer else ""
            noted_as, name = word if noted is None else noted, f"{self.command} {word}"
            said = (label, noted_as, self, is_harmful, will, did, keeps_order)
            made = Verb(name, run, args or self.args, route, {200: self.answer}, {}, *said)
            self.verbs[word] = VERBS[name] = made
            return run

        return add

    def dry_run(self, view: View, wanted: Any, within_s: float) -> DryRun:
        until, ends_s = self.until(view), thread_time() + within_s  # of a core: an overloaded machine counts all, too
        preview, seen = Preview(), set[bytes]()
        for page in self.pages(view, wanted, until):
            preview.add(item for item in page if item.id not in seen)  # a ticket may come twice
            seen.update(item.id for item in page)
            if thread_time() > ends_s:
                return DryRun(preview, until, False)
        return DryRun(preview, until, True)

    def sentences(self, words: Iterable[str]) -> list[str]:
        return [f"{number:,} {word}: {self.means.get(word, word)}" for word, number in Counter(words).most_common()]


@dataclass(frozen=True)
class Verb:
    """``name``: its command; ``route``: method and path below ``/api``, "" for none; ``answers`` and ``problems``
    (beyond those of every route): what it answers there. ``noted``: what the action log calls it, "" where its step
    writes its line itself. ``is_harmful``: its button is red. ``will`` and ``did``: what happens to the items, for
    people. ``keeps_order``: it is done to all of a page in one step, in their order."""

    name: str
    run: Callable[..., Any]
    args: type[Args]
    route: str
    answers: Mapping[int, Any]
    problems: Mapping[int, str]
    label: str = ""
    noted: str = ""
    shelf: Shelf | None = None
    is_harmful: bool = False
    will: str = ""
    did: str = ""
    keeps_order: bool = False

    @property
    def form(self) -> str:
        """Return the path of the page's form; "" for none."""
        if not self.route:
            return ""
        return f"{self.shelf.path}/{self.word}" if self.shelf else f"/{self.name.replace(' ', '/')}"

    @property
    def word(self) -> str:
        return self.name.rpartition(" ")[2]

    @property
    def help(self) -> str:
        return " ".join((inspect.getdoc(self.run) or "").split())

    @property
    def places(self) -> list[str]:
        """Return the names in the path, and on the command line, beside the arguments."""
        return [] if self.shelf else [*inspect.signature(self.run).parameters][2:]

    def perform(self, view: View, args: Any, /, **places: str) -> Outcome:
        """Do it. Raises Unfit, TooManyRules, and what ``Link.call`` raises, with what was done by then noted."""
        if self.shelf is None:
            outcome: Outcome = self.run(view, args, **places)
            return outcome
        items, cursor = self.shelf.chosen(view, args)
        others = self.shelf.others(view, self.word)  # before: an error here must not hide what was done
        results = list(BulkJob(self, self.shelf, view, args, None, "", b"", len(items)).carry_out([items]))
        words = [one.word for one in results]
        others = others if "added" in words else []
        document = {"results": [shown(one) for one in results], "cursor": cursor, "other_groups": others}
        return Outcome(document, "; ".join(filter(None, (self.sentence(args, words), also_for(others)))))

    def sentence(self, args: Any, words: Sequence[str]) -> str:
        """Tell people what came of it."""
        if self.shelf is None or not self.did:
            return f"{self.label}: {counted(words)}"
        done, noun = sum(word in self.shelf.good for word in words), self.shelf.noun.rpartition(" ")[2]
        left = Counter(word for word in words if word not in self.shelf.good)
        told = [f"{pluralize(done, noun)} {self.did.format(when=moment(getattr(args, 'due_ms', 0)) + ' UTC')}"]
        return "; ".join(told + [f"{number:,} {self.shelf.means[word]}" for word, number in left.items()])


def verb(
    name: str,
    route: str,
    args: type[Args],
    answers: Mapping[int, Any] | None = None,
    problems: Mapping[int, str] | None = None,
) -> Callable[[_Run], _Run]:
    """Decorate a function ``(view, args, *places)`` so that it is a verb (see ``Verb``)."""

    def add(run: _Run) -> _Run:
        VERBS[name] = Verb(name, run, args, route, answers or {}, problems or {})
        return run

    return add


def shown(result: StepResult) -> dict[str, Any]:
    """Return the result of a step for programs."""
    made = {"message_id": result.message_id.decode()} if result.message_id else {}
    return {"id": result.id.decode(), "outcome": result.word} | made


# -- dead letters

_Age = Annotated[float, Field(ge=0, le=10**9, allow_inf_nan=False)]


class LetterAsk(Ask):
    """A filter for dead letters."""

    ticket: TicketId | None = Field(None, description="Only those of this ticket.")
    reason: str = Field("", max_length=200, description="Only those given up for a reason that contains this.")
    error: str = Field("", max_length=200, description="Only those whose error, or its type, contains this.")
    id: StreamId | None = Field(None, description="Only the one with this id, or of the message with this id.")
    older_than_s: _Age | None = Field(None, description="Only those written longer ago than this: 90s, 10m, 2h, 3d.")
    younger_than_s: _Age | None = Field(None, description="Only those written less long ago than this.")
    policy: Literal["", "skip", "halt"] = Field("", description="Only those written under this policy.")
    group: str = Field("", pattern="^([0-9a-f]{12}|others)?$", description="Only those of a kind (`usher dead kinds`).")

    def meant(self, sees_texts: bool = True) -> LetterFilter:
        now_ms = wall_ms()
        ticket, letter_id = (
            None if text is None else text.encode("utf-8", "surrogateescape") for text in (self.ticket, self.id)
        )
        younger, older = (
            None if age_s is None else now_ms - int(age_s * 1000) for age_s in (self.younger_than_s, self.older_than_s)
        )
        return LetterFilter(
            ticket, self.reason, self.error, letter_id, younger, older, self.policy, sees_texts, self.group
        )


_ONE_OF = [{"required": [name], "properties": {name: {"not": {"type": "null"}}}} for name in ("ids", "filter")]


class ChosenLetters(Args, json_schema_extra={"oneOf": _ONE_OF}):
    """Dead letters by their ids, or a page of those that a filter fits."""

    ids: list[StreamId] | None = Field(None, min_length=1, max_length=_MOST_IDS)
    filter: LetterAsk | None = None
    limit: int = Field(AT_ONCE, ge=1, le=_MOST_IDS)
    cursor: StreamId | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> ChosenLetters:
        if (self.ids is None) == (self.filter is None):
            raise ValueError("give either ids or filter")
        return self


def _chosen_letters(view: View, args: ChosenLetters) -> tuple[Sequence[Any], str | None]:
    if args.filter is None:
        return _items(args.ids or ())
    # A message that is redriven and given up again meanwhile is not met: its new letter is above this last id.
    after = None if args.cursor is None else args.cursor.encode()
    page = view.letters.page(args.filter.meant(), after, args.limit, view.letters.last_id())
    return page.letters, None if page.cursor is None else page.cursor.decode()


def _items(ids: Sequence[str]) -> tuple[list[Item], None]:
    return [Item(one.encode()) for one in dict.fromkeys(ids)], None


def _letter_warnings(view: View, word: str, preview: Preview) -> list[str]:
    if word != "redrive" or not preview.adds:
        return []
    told = [f"{preview.adds:,} will be new messages: {also}"] if (also := also_for(view.letters.other_groups())) else []
    overtaken, is_all = view.letters.overtaken(preview.first, _LOOK_S)
    many = f"{'' if is_all else 'at least '}{pluralize(overtaken, 'ticket')} {_OVERTAKEN}"
    return [*told, *([many] if overtaken else [])]


LETTERS = Shelf(
    noun="dead letter",
    command="dead",
    path="/dead-letters",
    ask=LetterAsk,
    args=ChosenLetters,
    means={
        "resumed": "their tickets waited for them and go on, in the order of the stream",
        "added": "new messages at the end of the stream, behind the later ones of their tickets; with their uid",
        "released": "thrown away; the tickets that waited for them go on without them",
        "dropped": "thrown away",
        "done": "done, but the answer was lost on the way",
        "gone": "not found",
        "cut": "not done: some of their fields were too large to keep, and their entries are gone from the stream",
        "held": "not done: their tickets have an owner at the moment; try again",
    },
    good=frozenset(("resumed", "added", "released", "dropped", "done")),
    meant=lambda ask, sees_texts: ask.meant(sees_texts),
    until=lambda view: view.letters.last_id(),
    pages=lambda view, wanted, until: view.letters.all(wanted, until),
    named=lambda view, ids: (found[0] for one in ids if (found := view.letters.get(one.encode())) is not None),
    on=lambda ids, args: pluralize(len(ids), "dead letter") + (f", from {ids[0].decode()}" if ids else ""),
    chosen=_chosen_letters,
    others=lambda view, word: view.letters.other_groups() if word == "redrive" else [],
    warns=_letter_warnings,
)


@LETTERS.verb("redrive", "Redrive", is_harmful=False)
def redrive(view: View, items: Sequence[Any], args: Args) -> Iterator[Any]:
    """Turn dead letters into messages again; their attempts begin anew. A halted ticket goes on with the very message
    it waited for, then with its later ones. All other messages go to the end of the stream, where every group of the
    stream gets them, also one that has handled them."""
    return view.letters.change("redrive", [item.id for item in items])


@LETTERS.verb("drop", "Drop")
def drop(view: View, items: Sequence[Any], args: Args) -> Iterator[Any]:
    """Throw dead letters away for good. A halted ticket goes on without the message it waited for."""
    return view.letters.change("drop", [item.id for item in items])


class EditedLetter(Args):
    """Fields of a dead letter's message, by name: those that are given get this text; the others stay as they are."""

    fields: dict[Annotated[str, Field(min_length=1)], str] = Field(max_length=1000)


@verb("dead edit", "POST /dead-letters/<letter_id>/edit", EditedLetter, {200: ItemOutcome}, _NOT_EDITED)
def edit(view: View, args: EditedLetter, letter_id: str) -> Outcome:
    """Send the message of a dead letter with other fields: as a new message at the end of its ticket, with a uid of its
    own; the letter goes in the same step. A halted ticket goes on with its later messages."""
    found = view.letters.get(letter_id.encode()) if is_id(letter_id) else None
    if found is None:
        return Outcome({}, "no dead letter has that id", 404, "unknown_dead_letter")
    if found[0].cut:
        return Outcome({}, LETTERS.means["cut"], 409, "letter_not_sent")
    flat, field, others = found[1], view.letters.ticket_field, view.letters.other_groups()
    before = ticket_value(flat, field)
    for name, text in {"uid": f"edited-{letter_id}", **args.fields}.items():
        key = name.encode()
        at = next((at for at in range(0, len(flat), 2) if flat[at] == key), len(flat))
        if at == len(flat) or editable(flat[at + 1]) != text:  # a form says again what is not changed
            flat[at : at + 2] = [key, text.encode()]
    try:
        ticket = check_ticket(ticket_value(flat, field)).decode()
    except MessageUndecodable as wrong:
        raise Unfit("fields", f"{wrong}: its ticket is in the field {field.decode()}") from None
    if before == found[0].ticket and before != ticket.encode():
        raise Unfit("fields", f"it stays a message of ticket {before.decode(errors='replace')}")
    result, action = view.letters.edit(found[0].id, flat), OperatorAction(view.by, "edit", f"a letter of {ticket}")
    view.action_log.note(action, f"{result.word} {result.message_id.decode()}".strip())
    if result.word != "added":
        return Outcome({}, LETTERS.means[result.word], 409, "letter_not_sent")
    says = f"Sent as message {result.message_id.decode()}, behind the others of ticket {ticket}; the letter is gone"
    return Outcome(shown(result), "; ".join(filter(None, (says, also_for(others)))))


def editable(value: bytes) -> str | None:
    """Return a value as the text that a form gives back as it was; None for one of which it would not."""
    text = value.decode(errors="replace")
    is_plain = text.replace("\n", "").replace("\t", "").isprintable() and text.encode() == value
    return text if is_plain and len(value) <= _LONGEST_EDITED else None


# -- delayed messages


class DelayedAsk(Ask):
    """A filter for delayed messages."""

    ticket: TicketId | None = Field(None, description="Only those of this ticket.")


class ChosenDelayed(Args):
    """Ids of delayed messages."""

    ids: list[StreamId] = Field(min_length=1, max_length=_MOST_IDS)


class MovedDelayed(ChosenDelayed):
    """Ids of delayed messages, and their new time."""

    due_ms: int = Field(ge=0, lt=LATEST_MS)


def _delayed_pages(view: View, ticket: str | None, until: bytes) -> Iterator[Sequence[Any]]:
    yield [
        Item(one.encode(), (of, "", "", ""))
        for one, of in view.delayed.every(ticket)
        if rank(one.encode()) <= rank(until)
    ]


DELAYED = Shelf(
    noun="delayed message",
    command="delayed",
    path="/delayed",
    ask=DelayedAsk,
    args=ChosenDelayed,
    means={
        "moved": "sent at the time given, or now",
        "dropped": "thrown away",
        "done": "done, but the answer was lost on the way",
        "gone": "left alone: not waiting any more, because it was sent or dropped before",
        "held": "left alone: no leader has put it in order yet; ask again in a moment",
        "unknown": "left alone: no delayed message has had this id",
    },
    good=frozenset(("moved", "dropped", "done")),
    grouped="ticket",
    at_once=200,
    meant=lambda ask, sees_texts: ask.ticket,
    until=lambda view: view.delayed.last_id(),
    pages=_delayed_pages,
    named=lambda view, ids: (Item(row.id.encode(), (row.ticket_id, "", "", "")) for row in view.delayed.chosen(ids)),
    on=lambda ids, args: chosen_delayed(len(ids), ids[0].decode() if ids else "", getattr(args, "due_ms", 0) or None),
    chosen=lambda view, args: _items(args.ids),
)


@DELAYED.verb("send", "Send now", SEND_NOW, is_harmful=False, will="sent now", did="to be sent now", keeps_order=True)
def send_now(view: View, items: Sequence[Any], args: Args) -> Iterator[Any]:
    """Send delayed messages now: the leading master adds them to their stream at once, in the order of their times."""
    return view.delayed.move([item.id.decode() for item in items], None)


@DELAYED.verb(
    *("move", "Move", MOVE), is_harmful=False, args=MovedDelayed, will="due at", did="moved to {when}", keeps_order=True
)
def move(view: View, items: Sequence[Any], args: MovedDelayed) -> Iterator[Any]:
    """Move delayed messages to another time, at most ten years ahead: they come into their stream then, and not
    before."""
    try:
        check_due(args.due_ms, view.delayed.now_ms())
    except ValueError as refused:
        raise Unfit("due_ms", str(refused)) from None
    return view.delayed.move([item.id.decode() for item in items], args.due_ms)


@DELAYED.verb("drop", "Drop", DROP, will="thrown away", did="dropped")
def drop_delayed(view: View, items: Sequence[Any], args: Args) -> Iterator[Any]:
    """Throw delayed messages away before they are sent, for every group of the stream."""
    return view.delayed.drop([item.id.decode() for item in items])


# -- tickets


class TicketAsk(Ask):
    """A filter for tickets in processing."""

    state: str = Field("", max_length=400, description=f"Only these: {', '.join(LISTED)}.")
    consumer: str = Field("", max_length=400, description="Only those that this consumer has.")
    error: str = Field("", max_length=400, description="Only those whose last error has this.")

    @field_validator("state")
    @classmethod
    def _states(cls, text: str) -> str:
        parse_states(text)
        return text

    def meant(self, sees_texts: bool = True) -> TicketFilter:
        return TicketFilter(parse_states(self.state), self.consumer, self.error, sees_texts)


def _ticket_item(row: dict[str, Any]) -> Item:
    error = row.get("last_error") or {}
    name = error_name(error.get("error_type", ""), error.get("error", ""))
    group, head = (row["state"], name, "", error.get("at", "")), (row.get("message_ids") or [""])[0]
    return Item(row["ticket_id"].encode("utf-8", "surrogateescape"), group, head)


def _ticket_pages(view: View, wanted: TicketFilter, until: bytes) -> Iterator[Sequence[Any]]:
    for page in view.status.each(wanted):
        items = map(_ticket_item, page)
        yield [item for item in items if not item.head or rank(item.head.encode()) <= rank(until)]


TICKETS = Shelf(
    noun="ticket",
    command="tickets",
    path="/tickets",
    ask=TicketAsk,
    args=Args,
    answer=None,
    at_once=1,
    means={"refused": "nothing was done", NO_ROOM: "nothing was done: there are as many rules as there may be"},
    grouped="state",
    good=frozenset(("asked", "done", "set", "replaced")),
    meant=lambda ask, sees_texts: ask.meant(sees_texts),
    until=lambda view: b"%d-0" % view.delayed.now_ms(),
    pages=_ticket_pages,
    named=lambda view, ids: (Item(one.encode("utf-8", "surrogateescape")) for one in ids),
    on=lambda ids, args: pluralize(len(ids), "ticket"),
    chosen=lambda view, args: ((), None),
)


_ORDERS = {
    TicketOrder.RETRY: "Start a ticket's first message now, instead of waiting for its next attempt.",
    TicketOrder.GIVE_UP: "Make a dead letter of a ticket's first unfinished message, in its turn; the ticket goes on"
    " with the next one, under any dead letter policy. A message that runs is given up when its run has failed.",
    TicketOrder.CANCEL: "End the run of a ticket's message, as that of one past its deadline is ended: with its"
    " process, unless it has one of its own. It counts as a crash, and what else runs there is cut off and runs again.",
    TicketOrder.INTERRUPT: "Tell the run of a ticket's message to end: ``message.cancelled`` is set, and an"
    " ``async def`` handler gets a CancelledError. The handler decides how it ends; nothing else is cut off.",
    TicketOrder.CLEAR: "Make dead letters (reason ``cleared``) of what waits of a ticket at its consumer, in order;"
    " what runs is left alone.",
}


def _add_order(order: TicketOrder, told: str) -> None:
    def give(view: View, items: Sequence[Any], args: Args) -> Iterator[StepResult]:
        for item in items:
            result = view.give(order, item.id.decode("utf-8", "surrogateescape"), item.head)
            yield StepResult(item.id, result.outcome, note=result.note)

    give.__doc__, word = told, order.value.replace("_", "-")
    TICKETS.verb(word, word.replace("-", " ").capitalize(), "", is_harmful=order is not TicketOrder.RETRY)(give)


for _order, _told in _ORDERS.items():
    _add_order(_order, _told)


@TICKETS.verb("pause", "Pause", "", is_harmful=False)
def pause(view: View, items: Sequence[Any], args: Args) -> Iterator[Any]:
    """Pause each of these tickets by a rule of its own, until it is lifted. What a consumer already has goes on."""
    by = view.by
    for item in items:
        name = item.id.decode("utf-8", "surrogateescape")
        rule = Rule(Target.TICKET, name, RuleAction.PAUSE, reason=by.why, who=by.who)
        try:
            yield StepResult(item.id, view.rules.set(rule, by).outcome)
        except TooManyRules as full:
            yield StepResult(item.id, NO_ROOM, note=str(full))
            return


class OrderArgs(Args):
    """Arguments of every order about a ticket."""

    preview: bool = False
    grace_s: float = Field(0.0, ge=0, le=86_400, description="Cancel an interrupted run that has not ended after this.")
    fields: dict[str, str] | None = Field(None, description="A message that is sent first, to the same ticket.")


class NewOrder(OrderArgs):
    """An order about the first unfinished message of a ticket."""

    ticket_id: TicketId
    order: Literal["retry", "give_up", "cancel", "interrupt", "clear"]


@verb("tickets order", "POST /orders", NewOrder, {200: OrderResult}, {409: "order_refused"})
def order(view: View, args: NewOrder) -> Outcome:
    """Order something about the first unfinished message of a ticket: retry (due now), give_up (it becomes a dead
    letter, in order), cancel (its run is ended), interrupt (its run is told) or clear (what waits behind it becomes
    dead letters). With preview nothing happens."""
    about = (TicketOrder(args.order), args.ticket_id)
    sent = view.producer.send(args.ticket_id, args.fields) if args.fields and not args.preview else ""
    result = view.preview(*about) if args.preview else view.give(*about, grace_s=args.grace_s)
    refused, told = result.outcome == "refused", f"{result.outcome}: {result.note}"
    told = f"sent {sent}; {told}" if sent else told
    return Outcome(vars(result) | {"sent": sent or None}, told, 409 if refused else 200, "order_refused" * refused)


# -- rules


class OfTarget(Args):
    """Target of a rule."""

    target: Literal["ticket", "pattern", "tenant", "stream", "everything", "consumer"]
    value: str = ""


class NewRule(OfTarget):
    """A rule for a target: pause it, slow it down, or limit what waits of each ticket."""

    action: Literal["pause", "slow", "limit"]
    rate_per_second: Annotated[float, Field(ge=0.001, le=1_000_000, allow_inf_nan=False)] | None = None
    concurrency: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    weight: Annotated[int, Field(ge=1, le=1000)] | None = None
    ticket_limit: Annotated[int, Field(ge=1, le=1_000_000)] | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> NewRule:
        self.check()
        return self

    def check(self) -> None:
        """Raise ValueError for what does not fit together."""
        of_tenant = self.concurrency is not None or self.weight is not None
        if of_tenant and (self.target, self.action) != ("tenant", "slow"):
            raise ValueError("concurrency and weight are for a tenant (--tenant) that is slowed")
        if (self.action == "slow") != (of_tenant or self.rate_per_second is not None):
            raise ValueError(
                "slow needs rate_per_second (--rate) or, of a tenant, concurrency or weight; only slow takes them"
            )
        if (self.action == "limit") != (self.ticket_limit is not None):
            raise ValueError("give ticket_limit with limit, and only then")
        if (self.target == "everything") != (self.value == ""):
            raise ValueError("give value, except with the target everything")
        if len(self.value.encode("utf-8", "surrogatepass")) > LONGEST_TICKET:
            raise ValueError(f"value must be text of at most {LONGEST_TICKET} bytes")
        if self.target == "consumer" and (self.action != "pause" or not NAME.fullmatch(self.value)):
            raise ValueError("a consumer can only be paused, and its name is 1 to 64 of A-Z a-z 0-9 . _ -")


def _beside(view: View, args: OfTarget) -> str:
    """Tell what else holds, or does not, of a target."""
    if args.target == "tenant" and not view.settings.tenant_field:
        return "; USHER_TENANT_FIELD is empty here: where masters have none, no message is of a tenant"
    fitting = view.rules.read().all_of(args.value.encode("utf-8", "surrogateescape")) if args.target == "ticket" else ()
    others = (rule for rule in fitting if rule.id != rule_id(Target.TICKET, args.value))
    return "".join(f"; another rule fits it too: it is {one.told()}; `usher rules lift {one.id}`" for one in others)


def _changed(changed: RuleSetChange | None, problem: str, text: str, name: str = "", says: str = "") -> Outcome:
    if changed is None:
        return Outcome({}, text, 404, problem)
    return Outcome(changed.shown() | {"name": name or None}, says or changed.told)


@verb("rules set", "POST /rules", NewRule, {201: RuleSetChange, 200: RuleSetChange}, {409: "too_many_rules"})
def set_rule(view: View, args: NewRule) -> Outcome:
    """Set a rule: 201 new, 200 in place of the former one for that target."""
    if args.target == "stream" and args.value != view.keys.stream:
        raise Unfit("value", "must be the stream of this master")
    named = (Target(args.target), args.value, RuleAction(args.action), args.rate_per_second, args.reason, view.by.who)
    limits = {name: getattr(args, name) for name in ("concurrency", "weight", "ticket_limit")}
    changed = view.rules.set(Rule(*named, **limits), view.by)
    done = _changed(changed, "", "", says=changed.told + _beside(view, args))
    return done._replace(status=201 if changed.outcome == "set" else 200)


class LiftedRule(Args):
    """A rule that is lifted, or all that are alike but for their tickets."""

    until: int | None = Field(None, strict=False, description="All that are alike, but those of later versions.")


@verb("rules lift", "DELETE /rules/<rule_id>", LiftedRule, {200: RuleSetChange}, {404: "unknown_rule"})
def lift(view: View, args: LiftedRule, rule_id: str) -> Outcome:
    """Lift a rule."""
    if args.until is None:
        return _changed(view.rules.lift(rule_id, view.by), "unknown_rule", "no such rule")
    some = next((some for some in alike(view.rules.read().rules) if rule_id in {one.id for one in some}), [])
    done = [view.rules.lift(one.id, view.by, version=one.version) for one in some if one.version <= args.until]
    told = counted("gone already" if one is None else one.outcome for one in done)
    nothing = told if done else "These rules have changed since the page was made: look again"
    return _changed(next(filter(None, done), None), "unknown_rule", nothing, says=told)


@verb("resume", "", OfTarget)
def resume(view: View, args: OfTarget) -> Outcome:
    """Lift the rule of a target: its tickets go on, in the order of the stream."""
    named = (Target(args.target), args.value)
    changed = view.rules.lift(rule_id(*named), view.by, "resume")
    nothing, beside = f"there is no rule for {args.target} {args.value}".rstrip(), _beside(view, args)
    return _changed(changed, "unknown_rule", nothing + beside, says=changed.told + beside if changed else "")


_DRAINED = {404: "unknown_consumer", 409: "too_many_rules"}


@verb("consumers drain", "POST /consumers/<name>/drain", Args, {200: RuleSetChange}, _DRAINED)
def drain(view: View, args: Args, name: str) -> Outcome:
    """Hand nothing more to a consumer: it finishes its messages, and new ones go to others. This holds for the name,
    also after a restart, until `usher consumers resume`."""
    if view.link.call("HGET", view.keys.consumers, name) is None:
        return _changed(None, "unknown_consumer", "no consumer of that name is registered")
    rule = Rule(Target.CONSUMER, name, RuleAction.PAUSE, reason=view.by.why, who=view.by.who)
    changed = view.rules.set(rule, view.by, "drain")
    held = pluralize(changed.handed_over, "message")
    says = f"{name} is drained: it is handed nothing more and finishes its messages ({held})"
    return _changed(changed, "", "", name, says)


@verb("consumers resume", "POST /consumers/<name>/resume", Args, {200: RuleSetChange}, {404: "not_drained"})
def resume_consumer(view: View, args: Args, name: str) -> Outcome:
    """Resume a consumer that an operator has drained. One that shuts down goes on with that."""
    nobody = "no consumer of that name was drained by an operator"
    changed = view.rules.lift(rule_id(Target.CONSUMER, name), view.by, "resume")
    return _changed(changed, "not_drained", nobody, name, f"{name} gets work again")


#: Most jobs that are remembered, and most items that are named because nothing was done for them.
_REMEMBERED, _NAMED = 20, 200
_IDLE_S = 5.0
RUNNING, DONE, STOPPED = "running", "done", "stopped"


@dataclass
class BulkJob:
    """A bulk job, of the service or of a command. Written by its thread, read by pages; ``told`` is the filter in
    words, ``count`` how many a dry run has found. ``touched``: items that are done, of which a ticket may come
    again. ``tries``: of a step whose answer is lost."""

    verb: Verb
    shelf: Shelf
    view: View
    args: Args
    wanted: Any
    told: str
    until: bytes
    count: int
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    state: str = RUNNING
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[str, str]] = field(default_factory=list)
    created_ms: int = field(default_factory=wall_ms)
    touched: dict[bytes, None] = field(default_factory=dict)
    pages: Iterator[Sequence[Any]] | None = None
    failed_turns: int = 0
    tries: int = 1

    @property
    def done(self) -> int:
        return self.outcomes.total()

    @property
    def is_over(self) -> bool:
        return self.state in (DONE, STOPPED)

    @property
    def what(self) -> str:
        return self.verb.noted or self.verb.word.replace("-", "_")

    @property
    def sentence(self) -> str:
        return self.verb.sentence(self.args, list(self.outcomes.elements()))

    def carry_out(self, pages: Iterable[Sequence[Any]]) -> Iterator[Any]:
        """Do it to all of these, yield what came of each, and note what was done, also when Redis fails in the
        middle."""
        ended, chosen = FAILED, list[bytes]()
        try:
            for page in pages:
                chosen += [item.id for item in page]
                yield from self.take(page)
                if self.is_over:
                    break
            ended = ""
        except (KeyboardInterrupt, GeneratorExit, Unfit):
            ended = ""
            raise
        finally:
            if self.verb.noted and (self.outcomes or ended):
                on = self.shelf.on([one for one in chosen if one in self.touched], self.args)
                action = OperatorAction(self.view.by, self.verb.noted, ": ".join(filter(None, (on, self.told))))
                self.view.action_log.note(action, counted(self.outcomes.elements()) + ended)

    def take(self, page: Sequence[Any]) -> Iterator[Any]:
        """Do it to the items of a page, in batches, until it is stopped, and yield what came of each."""
        items = [item for item in {item.id: item for item in page}.values() if item.id not in self.touched]
        at_once = max(1, len(items)) if self.verb.keeps_order else self.shelf.at_once
        for at in range(0, len(items), at_once):
            for result in self._results(items[at : at + at_once]):
                self.touched[result.id] = None
                self.outcomes[result.word] += 1
                if result.word not in self.shelf.good and len(self.failures) < _NAMED:
                    why = result.note or result.word
                    self.failures.append((result.id.decode(errors="replace"), why))
                if result.word == NO_ROOM:
                    self.state = STOPPED
                yield result
            if self.state != RUNNING:
                return

    def _results(self, items: Sequence[Any]) -> Iterator[Any]:
        """Do it to these. A command, whose answer is lost, asks again for what has none: what is gone then was done."""
        left = self.tries
        while True:
            try:
                asked = [item for item in items if item.id not in self.touched]
                for one in self.verb.run(self.view, asked, self.args):
                    yield one._replace(word="done") if one.word == "gone" and left < self.tries else one
                return
            except ReplyUnknown:
                left -= 1
                if not left:
                    raise
                time.sleep(0.2 * 2 ** (self.tries - left - 1))

    def note(self, outcome: str, what: str = "") -> None:
        action = OperatorAction(self.view.by, what or self.what, f"{self.shelf.noun}s: {self.told}")
        self.view.action_log.note(action, outcome)


class BulkJobs(Service):
    """Service that runs the jobs of one master, one page at a time, oldest first; but a job that fails lets the others
    pass."""

    name = "bulk"

    def __init__(self) -> None:
        super().__init__()
        self._jobs: list[BulkJob] = []
        self._lock = threading.Lock()

    # -- from other threads

    @property
    def jobs(self) -> list[BulkJob]:
        with self._lock:
            return list(reversed(self._jobs))

    def job(self, job_id: str) -> BulkJob | None:
        return next((one for one in self.jobs if one.id == job_id), None)

    def begin(self, verb: Verb, view: View, args: Args, wanted: Any, told: str, until: bytes, count: int) -> BulkJob:
        assert verb.shelf is not None
        job = BulkJob(verb, verb.shelf, view, args, wanted, told, until, count)
        with self._lock:
            forgotten = next((one for one in self._jobs if one.is_over), None)
            if len(self._jobs) >= _REMEMBERED and forgotten is not None:
                self._jobs.remove(forgotten)
            self._jobs.append(job)
        job.note("begun")
        event("bulk_started", what=verb.name, count=count, filter=told, by=view.by.who, why=view.by.why)
        self.wake()
        return job

    def stop_job(self, job: BulkJob) -> None:
        with self._lock:
            if not job.is_over:
                job.state = STOPPED

    # -- the turn

    def run_once(self) -> float:
        waiting = [one for one in reversed(self.jobs) if one.state == RUNNING]
        job = min(waiting, key=lambda one: one.failed_turns, default=None)
        if job is None:
            return _IDLE_S
        try:
            job.pages = job.pages or job.shelf.pages(job.view, job.wanted, job.until)
            page = next(job.pages, None)
            if page is not None:
                for _ in job.take(page):
                    self.made_progress()
                if NO_ROOM in job.outcomes:
                    self._note(job)
            elif self._ends(job):
                self._note(job)
        except Exception:
            job.pages = None
            job.failed_turns += 1
            raise
        return 0.0

    def _ends(self, job: BulkJob) -> bool:
        with self._lock:  # it may be stopped at this moment
            was_running, job.state = job.state == RUNNING, DONE if job.state == RUNNING else job.state
        return was_running

    def _note(self, job: BulkJob) -> None:
        job.note(counted(job.outcomes.elements()))
        by, outcomes = job.view.by, dict(job.outcomes)
        event("bulk_finished", what=job.verb.name, outcomes=outcomes, filter=job.told, by=by.who, why=by.why)
