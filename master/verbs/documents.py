"""The documents that the master's routes answer, as the OpenAPI document describes them. A later version may add
fields, and removes none."""

from __future__ import annotations

from typing import Any, NotRequired

from typing_extensions import TypedDict

from usher.master.policy.rules import Rule


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
    ``started_ms``: when it was registered. A name of which only pending entries are left has less."""

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


class Consumers(TypedDict):
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


class ConsumerDetails(ConsumerRow):
    """``process``: null when it did not say."""

    process: ProcessRow | None


class ConsumerShown(TypedDict):
    """A consumer, and former incarnations of it that still hold entries."""

    consumers: list[ConsumerDetails]


class LetterRow(TypedDict):
    """A dead letter without its traceback and its message's fields (``fields`` is their number). ``at``: file and line
    of the error, in the handler's own code; ``handler``: MODULE:FUNCTION. ``error``: its text, of which viewers see
    the type only. ``shown_fields``: see TicketRow."""

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


class WholeLetter(LetterRow):
    """A whole dead letter. ``traceback``: empty for viewers; ``message_fields``: pairs of name and value; null for
    viewers, who may not see the contents of messages."""

    traceback: str
    message_fields: list[list[str]] | None


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
    sent, of one sent for later. ``again``: its redrives and replays, among the newest messages unless
    ``again_is_all``."""

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
    delayed: DelayedMessage | None
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
    again: list[str]
    again_is_all: bool


class Explanation(TypedDict):
    """A ticket's explanation. See ``usher.master.policy.explain.explain`` for all of it."""

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


class RuleChange(TypedDict):
    """A change of the rules. ``outcome``: set, replaced or lifted. From now on nothing is handed over by the former
    rules; ``handed_over`` messages had been before."""

    outcome: str
    version: int
    rule: Rule | None
    former: Rule | None
    handed_over: int
    handed_over_is_exact: bool
    note: str


class ConsumerRuleChange(RuleChange):
    name: str


class OrderAnswer(TypedDict):
    """Result of an order. ``outcome``: planned (a preview), asked (``consumer`` was told), or done. ``sent``: the
    message that was sent first."""

    ticket_id: str
    order: str
    outcome: str
    note: str
    message_id: str | None
    consumer: str | None
    sent: NotRequired[str]


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


class DelayedMessage(TypedDict):
    """A delayed message. ``due_ms``: when it is sent, by Redis' clock. ``fields``: the beginning of the first of its
    ``field_count`` fields, without ``due_ms``, ``stream`` and the ticket; null for viewers, who may not see the
    contents of messages."""

    id: str
    due_ms: int
    ticket_id: str
    stream: str
    bytes: int
    field_count: int
    fields: list[list[str]] | None


class DelayedList(TypedDict):
    """A page of delayed messages. ``cursor``: where the next page begins; null at the end. ``waiting``: all that wait,
    of which ``unsorted`` are in no list yet: no leader has put them in order. ``time_ms``: the time of Redis."""

    delayed: list[DelayedMessage]
    cursor: str | None
    waiting: int
    unsorted: int
    time_ms: int
