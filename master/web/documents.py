"""The documents that the master's routes answer, as the OpenAPI document tells them. A later version may add fields,
and takes none away."""

from __future__ import annotations

from typing import Any, NotRequired

from typing_extensions import TypedDict


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
    """``ok``, ``gone`` or ``stale`` for each message of each item of the report, in its order."""

    results: list[list[str]]


class ConsumerRow(TypedDict):
    """``state``: live, paused, draining, revoked or lost. A name of which only pending entries are left has no more
    than that."""

    name: str
    incarnation: str
    state: str
    lease_ms: int
    pending: int
    slots: NotRequired[int]
    capacity: NotRequired[int]
    health_url: NotRequired[str]


class Consumers(TypedDict):
    consumers: list[ConsumerRow]


class LetterRow(TypedDict):
    """A dead letter without its traceback and its message's fields (``fields`` is their number)."""

    id: str
    message_id: str
    ticket_id: str
    reason: str
    error: str
    error_type: str
    attempts: int
    owner: str
    first_ms: int
    last_ms: int
    written_ms: int
    policy: str
    fence: int
    fields: int
    cut: bool


class TicketRow(TypedDict):
    """``state``: processing, retrying (its first message has failed before), recovering (its owner is lost), returned,
    paused (given back, and a rule holds it: ``why``), halted, ending, waiting or unreadable. ``dead_letter``: the one
    that a halted ticket waits for."""

    ticket_id: str
    state: str
    fence: NotRequired[int]
    message_ids: NotRequired[list[str]]
    consumer_name: NotRequired[str]
    owner: NotRequired[str]
    why: NotRequired[str]
    dead_letter: NotRequired[LetterRow]


class Tickets(TypedDict):
    tickets: list[TicketRow]
    cursor: str | None


class Ticket(TicketRow):
    """``parked``: what the leader keeps back of it; null where that is not known: another master answers, or Redis
    alone keeps account of it (of a halted ticket, and of very many). ``/explain`` counts it then."""

    parked: NotRequired[int | None]


class Audit(TypedDict):
    """``audit``: as ``usher.master.audit.output.report.summary`` tells it."""

    audit: dict[str, Any] | None


class Sources(TypedDict):
    """``sources``: as ``usher.common.doctor.source_status`` tells it."""

    sources: dict[str, Any] | None


class Lag(TypedDict):
    """``lag``: not read yet, in the sources too where several are gathered. ``unfinished``: that, or pending.
    ``consumers``, ``slots``: of those that are live."""

    lag: int
    lag_is_exact: bool
    pending: int
    unfinished: int
    oldest_seconds: float
    consumers: int
    slots: int
    time_ms: int


class Letters(TypedDict):
    """``cursor``: where to go on; null at the end."""

    dead_letters: list[LetterRow]
    cursor: str | None


class WholeLetter(LetterRow):
    """``message_fields``: pairs of name and value; null for viewers, who do not see what messages say."""

    traceback: str
    message_fields: list[list[str]] | None


class LetterOutcome(TypedDict):
    """``outcome``: resumed, added, released, dropped; or gone, cut, held, when nothing was done. ``message_id``: of the
    message made of it."""

    id: str
    outcome: str
    message_id: NotRequired[str]


class LetterOutcomes(TypedDict):
    results: list[LetterOutcome]
    cursor: str | None


class Explanation(TypedDict):
    """In full in ``usher.master.policy.explain.explain``."""

    ticket_id: str
    state: str
    summary: str
    sentences: list[str]
    waits_for: Any
    until_ms: int | None
    entries: list[dict[str, Any]]


class RuleRow(TypedDict):
    """``target``: ticket, pattern, stream, everything or consumer. ``action``: pause, slow (with ``rate_per_second``)
    or dead_letter."""

    id: str
    target: str
    value: str
    action: str
    rate_per_second: float | None
    reason: str
    who: str
    version: int
    set_ms: int


class Rules(TypedDict):
    rules: list[RuleRow]
    version: int


class RuleChange(TypedDict):
    """``outcome``: set, replaced or lifted. Nothing is handed over by the former rules any more; ``handed_over``
    messages had been before."""

    outcome: str
    version: int
    rule: RuleRow | None
    former: RuleRow | None
    handed_over: int
    handed_over_is_exact: bool
    note: str


class ConsumerRuleChange(RuleChange):
    name: str


class ActionRow(TypedDict):
    """``via``: http or cli."""

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
