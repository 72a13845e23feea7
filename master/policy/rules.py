"""Live rules: an operator's orders for tickets, in force at once, without a deploy. Pure: the time is an argument.

=====  ==========================================================================================
rule   effect
=====  ==========================================================================================
pause  nothing more of the ticket is handed over; what its owner has already goes on to its end
slow   at most ``rate_per_second`` messages of each ticket are handed over per second
limit  at most ``ticket_limit`` messages of each ticket are unfinished; newer ones become dead letters
=====  ==========================================================================================

A rule is for one ticket, for those whose ids match a pattern (``*``, ``?``, ``[a-z]``), for those of a tenant, for the
stream, or for everything. There is one rule for a target: a second one replaces it; and one limit beside it. Of several
that match a ticket the strongest holds: pause, then the slowest; and the least limit. A rule for a ``consumer`` pauses
it: it is handed nothing more, also after a restart under the same name.

A tenant that is slowed has one limit for all of its tickets together: ``rate_per_second`` messages, or
``concurrency`` of them at a time, over all consumers; or another ``weight`` among the tenants. What slows its tickets
one by one holds as well.
"""

from __future__ import annotations

import enum
import fnmatch
import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from usher.common.base.text import pluralize

#: Most rules at a time: each pattern is tried for every ticket that is planned.
MOST_RULES = 1000
LONGEST_REASON = 500
#: Rules that were set within so many ms, and are equal but for the ticket, are shown as one.
_AT_ONCE_MS = 60_000
_FIELDS = ("target", "value", "action", "rate_per_second", "reason", "who", "concurrency", "weight", "ticket_limit")


class Target(enum.Enum):
    TICKET = "ticket"
    PATTERN = "pattern"
    TENANT = "tenant"
    STREAM = "stream"
    EVERYTHING = "everything"
    CONSUMER = "consumer"


class RuleAction(enum.Enum):
    PAUSE = "pause"
    SLOW = "slow"
    LIMIT = "limit"


@dataclass(frozen=True)
class Rule:
    """A live rule. ``value``: the ticket id, pattern, tenant, stream or consumer name; "" for everything.
    ``rate_per_second``: for slow, else None; ``concurrency`` and ``weight``: of a tenant that is slowed, else None;
    ``ticket_limit``: of a limit.
    ``version``: the number of the change that set it; ``set_ms``: when, in milliseconds since the epoch."""

    target: Target
    value: str
    action: RuleAction
    rate_per_second: float | None = None
    reason: str = ""
    who: str = ""
    version: int = 0
    set_ms: int = 0
    id: str = ""
    concurrency: int | None = None
    weight: int | None = None
    ticket_limit: int | None = None

    @property
    def strength(self) -> tuple[bool, float]:
        return self.action is RuleAction.PAUSE, -(self.rate_per_second or 0.0)

    def fits(self, ticket: str, tenant: bytes = b"") -> bool:
        if self.target is Target.TENANT:
            return tenant == _encode(self.value)
        if self.target is Target.TICKET:
            return self.value == ticket
        if self.target is Target.PATTERN:
            return fnmatch.fnmatchcase(ticket, self.value)
        return self.target is not Target.CONSUMER

    def shown(self) -> dict[str, Any]:
        facts = {name: getattr(self, name) for name in ("id", *_FIELDS, "version", "set_ms")}
        return facts | {"target": self.target.value, "action": self.action.value}

    def told(self) -> str:
        """Describe the rule for people: ``paused by alice: the customer asked (rule 3f2a, everything)``."""
        does = {"pause": "paused", "slow": f"slowed to {self.bounds}"}.get(
            self.action.value, f"limited to {self.bounds}"
        )
        has_value = self.target in (Target.PATTERN, Target.STREAM, Target.TENANT)
        of = self.target.value + (f" {self.value}" if has_value else "")
        why = f": {self.reason}" if self.reason else ""
        return f"{does} by {self.who or 'somebody'}{why} (rule {self.id}, {of})"

    @property
    def bounds(self) -> str:
        """How far it slows or limits: ``5/s, weight 3``."""
        told = {"{:g}/s": self.rate_per_second, "{} at a time": self.concurrency, "weight {}": self.weight}
        told |= {f"{pluralize(self.ticket_limit or 0, 'unfinished message')} of each ticket": self.ticket_limit}
        return ", ".join(text.format(value) for text, value in told.items() if value)


def rule_id(target: Target, value: str, is_limit: bool = False) -> str:
    """Return the id of the rule for a target, or of its limit: always the same one.

    >>> rule_id(Target.EVERYTHING, "")
    '71f1ef5259c5'
    """
    text = f"{target.value}\0{value}" + "\0limit" * is_limit
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:12]


def dump(rule: Rule) -> bytes:
    """Encode a rule as change_rules.lua stores it behind version and time."""
    return json.dumps({name: rule.shown()[name] for name in _FIELDS}).encode()


def parse(field: bytes, stored: bytes) -> Rule:
    """Parse a field of the ``rules`` hash. A rule that cannot be read pauses everything: nobody knows what it was to
    stop, and waiting loses nothing. Its reason says how to get rid of it."""
    shown_id = field.decode(errors="backslashreplace")
    try:
        version, set_ms, text = stored.split(b" ", 2)
        facts: dict[str, Any] = json.loads(text)
        target, action = Target(facts["target"]), RuleAction(facts["action"])
        value, reason, who, rate = (facts[name] for name in ("value", "reason", "who", "rate_per_second"))
        if not all(type(text) is str for text in (value, reason, who)):
            raise ValueError("not text")
        limits = {}
        if action is RuleAction.LIMIT:
            rate, limits = None, {"ticket_limit": _whole(facts["ticket_limit"] or 0)}
        elif action is not RuleAction.SLOW:
            rate = None
        elif target is Target.TENANT:
            limits = {name: _whole(facts[name]) for name in ("concurrency", "weight")}
            rate = None if rate is None and any(limits.values()) else float(rate)
        else:
            rate = float(rate)
        if rate is not None and not 0 < rate < float("inf"):
            raise ValueError("no rate")
        return Rule(target, value, action, rate, reason, who, int(version), int(set_ms), shown_id, **limits)
    except (ValueError, TypeError, KeyError, RecursionError):
        why = f"the rule {shown_id} cannot be read, so nothing moves: lift it (`usher rules lift {shown_id}`)"
        return Rule(Target.EVERYTHING, "", RuleAction.PAUSE, reason=why, id=shown_id)


def _whole(value: object) -> int | None:
    if value is not None and (type(value) is not int or value < 1):
        raise ValueError("not a whole number")
    return value


def _encode(value: str) -> bytes:
    return value.encode("utf-8", "surrogateescape")


def alike(rules: Iterable[Rule]) -> list[list[Rule]]:
    """Put together the rules, given by the time at which they were set, that differ in nothing but the ticket that they
    are for and were set within a minute of each other, as a bulk action sets them; each other one stands alone."""
    groups: list[list[Rule]] = []
    newest: dict[Rule, list[Rule]] = {}
    for rule in rules:
        same = replace(rule, value="", version=0, set_ms=0, id="") if rule.target is Target.TICKET else rule
        group = newest.get(same)
        if group is None or rule.set_ms - group[-1].set_ms > _AT_ONCE_MS:
            group = newest[same] = []
            groups.append(group)
        group.append(rule)
    return groups


class Rulebook:
    """All rules of a stream, ready for look-ups. ``version``: its number in Redis; "" while there never
    was a rule."""

    def __init__(self, rules: Iterable[Rule] = (), version: bytes = b"") -> None:
        self.version = version
        self.rules = sorted(rules, key=lambda rule: (rule.set_ms, rule.id))
        self.of_consumers: dict[str, Rule] = {}  # the rule that pauses each
        self._tickets: dict[bytes, Rule] = {}
        self._patterns: list[tuple[re.Pattern[str], Rule]] = []
        self._tenants: dict[bytes, Rule] = {}
        self._broad: Rule | None = None  # for the stream, or for everything
        self.limits = [rule for rule in self.rules if rule.action is RuleAction.LIMIT]
        #: Limits of tenants, which hold for all of their tickets together.
        self.tenant_limits: dict[bytes, Rule] = {}
        for rule in [one for one in self.rules if one not in self.limits]:
            if rule.target is Target.CONSUMER:
                self.of_consumers[rule.value] = rule
            elif rule.target is Target.TENANT:
                tenants = self.tenant_limits if rule.action is RuleAction.SLOW else self._tenants
                tenants[_encode(rule.value)] = rule
            elif rule.target is Target.TICKET:
                self._tickets[_encode(rule.value)] = rule
            elif rule.target is Target.PATTERN:
                self._patterns.append((re.compile(fnmatch.translate(rule.value)), rule))
            else:
                self._broad = _stronger(self._broad, rule)

    @property
    def is_empty(self) -> bool:
        return not (self._tickets or self._patterns or self._tenants or self._broad or self.tenant_limits)

    @property
    def holds_tenants(self) -> bool:
        return bool(self._tenants)

    @property
    def pauses_all(self) -> bool:
        return self._broad is not None and self._broad.action is RuleAction.PAUSE

    def of(self, ticket: bytes, tenant: bytes = b"") -> Rule | None:
        found = _stronger(self._broad, self._tickets.get(ticket))
        if self._tenants:
            found = _stronger(found, self._tenants.get(tenant))
        if self._patterns:
            text = text_of(ticket)
            for pattern, rule in self._patterns:
                if pattern.match(text):
                    found = _stronger(found, rule)
        return found

    def all_of(self, ticket: bytes, tenant: bytes = b"") -> list[Rule]:
        text = text_of(ticket)
        found = (rule for rule in self.rules if rule.action is not RuleAction.LIMIT and rule.fits(text, tenant))
        return sorted(found, key=lambda rule: rule.strength, reverse=True)

    def limit_of(self, ticket: bytes, tenant: bytes = b"") -> Rule | None:
        """Return the least limit of the ticket."""
        found = [rule for rule in self.limits if rule.fits(text_of(ticket), tenant)]
        return min(found, key=lambda rule: rule.ticket_limit or 0, default=None)


def text_of(ticket: bytes) -> str:
    """Return the ticket id as rules know it; a foreign field in the index may be no UTF-8."""
    return ticket.decode("utf-8", "surrogateescape")


def _stronger(one: Rule | None, other: Rule | None) -> Rule | None:
    if one is None or other is None:
        return one or other
    return other if other.strength > one.strength else one


class TokenBuckets:
    """Token buckets of what is slowed, by name. A bucket begins with one token and holds at most those of a second, but
    at least one."""

    #: Number of buckets above which those that have a token are forgotten.
    _MANY = 1000

    def __init__(self) -> None:
        self._buckets: dict[bytes, tuple[float, float, float]] = {}  # name -> tokens, at this time, rate
        self._most = self._MANY

    def tokens(self, name: bytes, rate: float, now_s: float) -> int:
        tokens, at_s, _ = self._buckets.get(name, (1.0, now_s, rate))
        tokens = min(max(1.0, rate), tokens + rate * max(0.0, now_s - at_s))
        if len(self._buckets) >= self._most:
            self._forget(now_s)
        self._buckets[name] = (tokens, now_s, rate)
        return int(tokens)

    def spend(self, name: bytes, count: int) -> None:
        """Take tokens out, or, with less than 0, give them back. A bucket that was forgotten meanwhile begins anew
        anyway."""
        if bucket := self._buckets.get(name):
            tokens, at_s, rate = bucket
            self._buckets[name] = (tokens - count, at_s, rate)

    def due_s(self, name: bytes, rate: float, now_s: float = 0.0) -> float:
        """Return when to ask again: with the next token, but not more often than ten times a second. ``now_s``: for a
        bucket that nobody has asked for yet."""
        tokens, at_s, _ = self._buckets.get(name, (1.0, now_s, rate))
        return at_s + max(0.1 if rate > 10 else 0.0, (1.0 - tokens) / rate)

    def _forget(self, now_s: float) -> None:
        """Forget the buckets that have a token again: they begin anew when asked for, with less, never with more."""
        buckets = self._buckets.items()
        self._buckets = {
            name: (has, at_s, rate) for name, (has, at_s, rate) in buckets if has + rate * (now_s - at_s) < 1
        }
        self._most = max(self._MANY, 2 * len(self._buckets))
