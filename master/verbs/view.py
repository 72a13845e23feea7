"""A view of one ticket stream: all that looks at it, and acts on it, over one link. Commands have one, and a master has
one for its routes and pages.

``View.explain`` reads the facts that an explanation (master/policy/explain) needs about a ticket. Everything
is in Redis; two things are not, and are asked where they are known: what the owner does with the ticket (its HTTP
interface), and what the leader has in memory (the board). Without an answer the explanation says what it does not know.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import quote

from usher.common.base.clock import now_s, wall_ms
from usher.common.doctor.judgements import INFO_COMMANDS, write_trouble
from usher.common.protocol.attempts import GIVEN_UP, decode
from usher.common.protocol.keys import MASTER, Keys, LogKeys
from usher.common.protocol.last_error import TRACEBACK
from usher.common.protocol.last_error import decode as decode_error
from usher.common.protocol.registration import name_of
from usher.common.protocol.stream_id import rank
from usher.common.protocol.ticket_states import due_ms_of
from usher.common.redis.client import Arg, CommandRefused, Link, checked
from usher.common.redis.replies import TicketRecord, TicketStream, found_entries, parse_record
from usher.common.runtime.settings import CommonSettings
from usher.common.sending.producer import Producer
from usher.master.insight.live import LiveOverview
from usher.master.insight.stats import StreamStatsReader, stream_sums
from usher.master.insight.status import MessageFields, StatusReader, TicketHistory
from usher.master.leader.elector import parse_held
from usher.master.membership.registry import RegisteredConsumer, members_of, state_of
from usher.master.operations.action_log import KEPT, ActionLog, By, OperatorAction
from usher.master.operations.live_rules import LiveRules, rulebook
from usher.master.operations.shelves import DeadLetters, DelayedView, member_of
from usher.master.policy.board.plans import BoardFacts
from usher.master.policy.explain import OwnerFacts, OwnerTold, TicketFacts, explain
from usher.master.policy.letters import HALT, LetterFilter
from usher.master.policy.rules import Rulebook
from usher.master.policy.states import kind_of
from usher.master.policy.ticket_orders import PlannedOrder, TicketOrder, plan_order

#: A search for one ticket's entries: entries per call, and calls; and seconds for all searches of one explanation.
_PAGE, _PAGES = 200, 25
_LOOK_S = 0.05
#: Clocks that differ by less count as one clock.
_CLOCKS_AGREE_MS = 1000

#: How often an order is planned anew when the ticket has just moved.
_TRIES = 3


@dataclass(frozen=True)
class OrderResult:
    """Result of an order. ``outcome``: planned (a preview), asked (``consumer`` was told), done, or refused: nothing
    happened, and ``note`` says why. ``sent``: the message that was sent first."""

    ticket_id: str
    order: str
    outcome: str
    note: str
    message_id: str | None = None
    consumer: str | None = None
    sent: str | None = None


class View:
    """``by``: who acts with it; ``within_s``: the time for fields of messages; ``ask_owner``: asks the owner at this
    health URL what it does with a ticket, None: no answer; ``board``: what this master has in memory, when it leads;
    ``pulse``: knows what waits for its turn, and what fails alike; ``ask``: returns a master's answer, by its URL and a
    path. Safe for many threads if the link is; only the thread that asked waits for an owner's answer.

    Any master can give orders about the first unfinished message of a ticket (master/policy/ticket_orders.py), and so
    can the commands: it needs no leader. A consumer learns of an order from its inbox, in which it stands behind what
    was handed over before; it says in its log what came of it. Doubt: after ReplyUnknown the order may be given again.
    If the ticket goes to somebody else meanwhile, nothing happens, and the order is planned anew. An owner that ends
    with an order unread leaves a message that is given up by who has it next, if that was the order: this stands in
    Redis. Else the order is lost: after a drain the message waits for its time, which `retry` can cut short again."""

    def __init__(
        self,
        settings: CommonSettings,
        link: Link,
        keys: Keys,
        within_s: float = math.inf,
        ask_owner: Callable[[str, str], OwnerTold | None] = lambda health_url, ticket_id: None,
        board: Callable[[bytes], BoardFacts | None] = lambda ticket: None,
        pulse: LiveOverview | None = None,
        ask: Callable[[str, str], dict[str, Any] | None] | None = None,
    ) -> None:
        self.settings, self.link, self.keys, self.by = settings, link, keys, By("", "")
        self._ask_owner, self._board, self._pulse, self._ask = ask_owner, board, pulse, ask
        self._stream, field = TicketStream(link, keys), settings.work_ticket_field
        self.status = StatusReader(link, keys, settings.sources, field)
        self.stats = StreamStatsReader(link, keys, self.status.sources)
        self.fields = MessageFields(link, keys, field, settings.shown_names, within_s)
        self.letters = DeadLetters(link, keys, field)
        self.delayed = DelayedView(link, keys, settings.ticket_field, settings.by_stream)
        self.rules, self.action_log = LiveRules(link, keys), ActionLog(link, keys)
        self.history = TicketHistory(link, keys, field)
        self.producer = Producer(link, keys.stream, field)

    def explained(self, ticket_id: str) -> dict[str, Any]:
        """Return the leader's explanation of a ticket, which knows more; ours, from Redis alone, where it is silent."""
        asked = quote(ticket_id.encode("utf-8", "surrogateescape"), safe="")
        return self.ask_leader(f"/api/explain?id={asked}") or self.explain(ticket_id)

    def ask_leader(self, path: str) -> dict[str, Any] | None:
        """Return what the leader answers to a GET, if this view asks it; None where it does not."""
        url = self.leader_url() if self._ask is not None else ""
        return self._ask(url, path) if self._ask is not None and url else None

    def acting(self, by: By) -> Self:
        """Return the same view for the verbs of a caller."""
        mine = copy.copy(self)
        mine.by = by
        return mine

    # -- explanations

    def explain(self, ticket_id: str) -> dict[str, Any]:
        ticket = ticket_id.encode("utf-8", "surrogateescape")
        board = self._board(ticket)
        found = self._read(ticket_id, ticket, board)
        owner_url = found.pop("health_url")
        told = self._ask_owner(owner_url, ticket_id) if owner_url else None
        if not (found["kind"] or found["unread"] or found["parked"]):
            seen = self.status.sources() or {"lag": 0, "lag_is_exact": True}
            found |= {
                "not_gathered": seen["lag"],
                "gathered_is_exact": seen["lag_is_exact"],
                "by_stream": self.settings.by_stream,
            }
        board, now_ms = self._board(ticket), wall_ms()
        pulse = self._pulse.snapshot() if self._pulse is not None else {}
        queue = self._pulse.queue if self._pulse is not None else None
        if (error := found.get("error")) is not None and error.alike and pulse:  # each consumer counts its own
            alike = [one["tickets"] for one in pulse["groups"] if one["text"] == error.told]
            found["error"] = error._replace(alike=max(error.alike, *alike, 0))
        if board is not None and board.has_all:  # memory knows what Redis would be searched for
            parked = tuple(one for one in board.first if one not in found["ids"])
            found |= {"parked": parked, "parked_is_exact": True}
        if board is not None and queue is not None:
            queue = queue.before(board.tenant.decode(errors="replace"))
        found |= {"told": told, "board": board, "lease_ms": int(self.settings.lease_seconds * 1000), "queue": queue}
        return explain(TicketFacts(ticket_id, now_ms, **found))

    def leader_url(self) -> str:
        held = self.link.call("GET", self.keys.leader)
        return parse_held(held).url or ""

    def _read(self, ticket_id: str, ticket: bytes, board: BoardFacts | None) -> dict[str, Any]:
        """Return all facts that Redis knows, as arguments of TicketFacts, and the owner's health URL. Makes few round
        trips: a busy master is slow at each."""
        keys, until_s = self.keys, now_s() + _LOOK_S
        seen = stream_sums(self.link, keys, _PAGE * _PAGES)
        of_ticket = [("HGET", keys.tickets, ticket), ("HGETALL", keys.rules), ("HGETALL", keys.consumers)]
        replies = self.link.pipeline([*INFO_COMMANDS, *of_ticket])
        told, (value, ruled, registered) = replies[: len(INFO_COMMANDS)], checked(replies[len(INFO_COMMANDS) :])
        kind, record, due_ms = _record(value)
        if kind == "owned" and (record := self._stream.in_processing(record)) is None:
            kind = ""
        ids = record.ids if record is not None else []
        rules, pending = rulebook(ruled), seen["by_name"]
        members = members_of(self.link, keys, registered)
        states = {incarnation: state_of(member, rules) for incarnation, member in members.items()}
        trouble = write_trouble(*told)
        found: dict[str, Any] = {
            "kind": kind,
            "fence": record.fence if record is not None else 0,
            "ids": tuple(ids),
            "lag": seen["lag"],
            "has_group": seen["has_group"],
            "leader": None if seen["epoch"] is None else seen["leader_url"] or "",
            "rules": tuple(rules.all_of(ticket, tenant := board.tenant if board is not None else b"")),
            "limit": rules.limit_of(ticket, tenant),
            "crowd": Counter(state for state in states.values() if state != "lost"),
            "room": sum(
                max(0, members[one].registration.capacity - pending.get(one.encode(), 0))
                for one, state in states.items()
                if state == "live"
            ),
            "health_url": "",
            "due_ms": due_ms,
            "refuses_writes": trouble.text if trouble is not None and trouble.is_certain else "",
        }
        if kind == "owned" and record is not None:
            found["owner"], found["health_url"] = self._owner(record.owner.decode(), members, rules)
        found["unread"], found["unread_is_exact"] = (), True
        if seen["lag"]:
            above = b"(" + seen["delivered"] if seen["has_group"] else b"-"
            found["unread"], found["unread_is_exact"] = self._find(keys.stream, ticket, above, "", until_s)
        found["parked"], found["parked_is_exact"] = (), True
        if seen["has_group"] and pending.get(MASTER) and not (board is not None and board.has_all):
            parked, found["parked_is_exact"] = self._find(keys.stream, ticket, b"-", keys.group, until_s)
            known = {*ids}
            found["parked"] = tuple(entry_id for entry_id in parked if entry_id not in known)
        if not (kind or found["unread"] or found["parked"]):
            found |= self._delayed(ticket, until_s)
        found |= self._attempts([*ids[:_PAGE], *found["parked"][:_PAGE]])
        return found | self._its_letters(ticket, kind)

    def _owner(
        self, incarnation: str, members: dict[str, RegisteredConsumer], rules: Rulebook
    ) -> tuple[OwnerFacts, str]:
        name = name_of(incarnation)
        successor = next(
            (
                other
                for other, member in members.items()
                if name_of(other) == name and other != incarnation and member.alive
            ),
            "",
        )
        paused = rules.of_consumers.get(name)
        member = members.get(incarnation)
        lease = self.keys.lease(incarnation)  # the lease may outlive the registration
        state, left_ms = self.link.all_of([("GET", lease), ("PTTL", lease)])
        if not isinstance(state, bytes):
            return OwnerFacts(incarnation, "", 0, successor, paused), ""
        url = member.registration.health_url if member is not None else ""
        return OwnerFacts(incarnation, state.decode(errors="replace"), max(0, left_ms), successor, paused), url

    def _delayed(self, ticket: bytes, until_s: float) -> dict[str, Any]:
        """Return the ticket's delayed messages and when the first of them is due. Messages that no leader has looked at
        yet may be due now."""
        log = LogKeys(self.keys.stream)
        try:
            ids, is_exact = self._find(log.delayed, ticket, b"-", "", until_s)
            *scores, (seconds, micros) = self.link.all_of(
                [*(("ZSCORE", log.due, member_of(entry_id.decode())) for entry_id in ids), ("TIME",)]
            )
        except CommandRefused:
            return {}  # the Redis user lacks this right, which is newer than many a user
        due_ms = min((int(float(score)) for score in scores if score is not None), default=0)
        ahead_ms = int(seconds) * 1000 + int(micros) // 1000 - wall_ms()
        if due_ms and abs(ahead_ms) >= _CLOCKS_AGREE_MS:
            due_ms = max(1, due_ms - ahead_ms)  # due by Redis' clock, shown by ours
        return {"delayed": len(ids), "delayed_is_exact": is_exact, "due_ms": due_ms}

    def _find(
        self, stream: str, ticket: bytes, start: bytes, group: str, until_s: float
    ) -> tuple[tuple[bytes, ...], bool]:
        """Find entries of the ticket above ``start``, in the stream or parked in the group. The second value is False
        when there are more entries than the search looked through."""
        found, is_all = list[bytes](), True
        wanted = (self.settings.work_ticket_field, ticket, "", group, MASTER if group else "")
        pages = found_entries(self.link, "XRANGE", stream, start, "+", _PAGE, *wanted)
        for number, (_, ids, _, is_last) in enumerate(pages, 1):
            found, is_all = found + ids, is_last
            if number == _PAGES or now_s() > until_s:
                break
        return tuple(found), is_all

    def _attempts(self, ids: Sequence[bytes]) -> dict[str, Any]:
        if not ids:
            return {}
        keys, first = self.keys, ids[0]
        noted, (error, traceback) = self.link.all_of(
            [("HMGET", keys.attempts, *ids), ("HMGET", keys.errors, first, TRACEBACK + first)]
        )
        return {
            "attempts": {one: decode(value) for one, value in zip(ids, noted, strict=True) if value is not None},
            "error": decode_error(error),
            "traceback": (traceback or b"").decode(errors="replace"),
        }

    def _its_letters(self, ticket: bytes, kind: str) -> dict[str, Any]:
        """Find the letter that a halted ticket waits for, or the newest letter of a ticket of which nothing is left."""
        if kind not in ("", "halted"):
            return {}
        found = self.letters.newest(LetterFilter(ticket, policy=HALT if kind else ""), None, 1, 0.0)
        letter, name = next(iter(found.letters), None), "letter" if kind else "last_letter"
        return {name: letter, "letters_are_all": letter is not None or found.cursor is None}

    # -- orders

    def preview(self, order: TicketOrder, ticket_id: str) -> OrderResult:
        """Return what the order would do now. Raises what ``Link.call`` raises."""
        planned = plan_order(order, self._in_processing(ticket_id), self.explained(ticket_id))
        return _result(ticket_id, order, planned, "planned")

    def offers(self, explained: dict[str, Any]) -> list[OrderResult]:
        ticket_id = explained["ticket_id"]
        record = self._in_processing(ticket_id)
        planned = [(order, plan_order(order, record, explained)) for order in TicketOrder]
        return [_result(ticket_id, order, plan, "planned") for order, plan in planned if not plan.refused]

    def give(self, order: TicketOrder, ticket_id: str, head: str = "", grace_s: float = 0.0) -> OrderResult:
        """Give the order. ``head``: the message that it is about; "": whichever is the ticket's first unfinished one.
        ``grace_s``: after so long what is interrupted is cancelled; 0: never. Raises what ``Link.call`` raises."""
        planned = PlannedOrder()
        for _ in range(_TRIES):
            planned = plan_order(order, self._in_processing(ticket_id), self.explained(ticket_id))
            if head and not planned.refused and planned.message_id.decode() != head:
                planned = planned._replace(refused=f"its first unfinished message is not {head} any more")
            if planned.refused:
                break
            answer = self._run(order, ticket_id, planned, grace_s)
            if answer in ("ASKED", "DONE"):
                return _result(ticket_id, order, planned, answer.lower())
        refused = planned.refused or "the ticket moves from one owner to the next just now: ask again in a moment"
        return _result(ticket_id, order, planned._replace(refused=refused), "refused")

    def _in_processing(self, ticket_id: str) -> TicketRecord | None:
        return self._stream.in_processing(self._stream.record_of(ticket_id.encode("utf-8", "surrogateescape")))

    def _run(self, order: TicketOrder, ticket_id: str, planned: PlannedOrder, grace_s: float = 0.0) -> str:
        keys, ticket = self.keys, ticket_id.encode("utf-8", "surrogateescape")
        script_keys = [keys.stream, keys.tickets, keys.attempts, keys.changed, keys.actions]
        if planned.owner:
            script_keys += [keys.lease(planned.owner), keys.inbox(planned.owner)]
        action = OperatorAction(self.by, order.value, f"ticket {ticket_id}, message {planned.message_id.decode()}")
        what = f"{order.value} {grace_s:g}" if grace_s else order.value
        about: list[Arg] = [keys.group, what, ticket, planned.believed, planned.message_id, KEPT, GIVEN_UP]
        return bytes(self.link.run("order", script_keys, [*about, *action.line()])).decode()


def _record(value: Any) -> tuple[str, TicketRecord | None, int]:
    if value is None:
        return "", None, 0
    try:
        record = parse_record(value)
    except ValueError:
        return "unreadable", None, 0
    return kind_of(record.owner), record._replace(ids=sorted(record.ids, key=rank)), due_ms_of(record.owner) or 0


def _result(ticket_id: str, order: TicketOrder, planned: PlannedOrder, outcome: str) -> OrderResult:
    if planned.refused:
        return OrderResult(ticket_id, order.value, "refused", planned.refused)
    told = (planned.message_id.decode() or None, planned.owner.rpartition(":")[0] or None)
    return OrderResult(ticket_id, order.value, outcome, planned.does, *told)
