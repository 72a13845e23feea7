"""Live rules in Redis: reads, sets and lifts them. Any master can, and so can the commands: it needs no leader.

Each change leaves a note in the stream ``changed``, which the leader watches: until it has read the new rules it hands
nothing over. So when ``set`` has returned, nothing more is handed over under the old rules; messages that were handed
over before go on to their end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from usher.common.base.errors import GroupMissing, UsherError
from usher.common.base.text import escape_control
from usher.common.protocol.keys import HALTED, MASTER, Keys
from usher.common.redis.client import Arg, CommandRefused, Link
from usher.common.redis.replies import TicketStream, pairs
from usher.master.operations.action_log import KEPT, By, OperatorAction
from usher.master.policy.rules import MOST_RULES, Rule, RuleAction, Rulebook, Target, dump, parse, rule_id, text_of

#: Most records of the index looked at to count the messages that a pattern matches.
_MOST_COUNTED = 100_000


class TooManyRules(UsherError):
    """The limit on rules is reached."""


@dataclass(frozen=True)
class RuleSetChange:
    """A change of the rules. ``outcome``: set, replaced or lifted. ``former``: the rule that held before. From now on
    nothing is handed over by it; ``handed_over`` messages had been before, and may still run. ``name``: of the consumer
    that it is about."""

    outcome: str
    version: int
    rule: Rule | None
    former: Rule | None
    handed_over: int = 0
    handed_over_is_exact: bool = True
    note: str = field(init=False)
    name: str | None = None

    def __post_init__(self) -> None:
        at_least = "" if self.handed_over_is_exact else "at least "
        running = (
            f"; {at_least}{self.handed_over:,} already handed over will finish"
            if self.handed_over
            else "; nothing of it is in processing"
            if self.handed_over_is_exact
            else "; what is handed over already will finish"
        )
        object.__setattr__(self, "note", self.outcome + (running if self.rule is not None else ""))

    @property
    def told(self) -> str:
        """Describe the change, its rule included, for people who see nothing else of it."""
        rule = self.rule or self.former
        if rule is None:
            return self.note
        what = "drain" if rule.target is Target.CONSUMER else rule.action.value
        former = self.former if self.rule is not None else None
        ends = former is not None and (former.action, former.bounds) != (rule.action, rule.bounds)
        was = f"; it is no longer {escape_control(former.told())}" if former and ends else ""
        return f"{f'{what} {rule.target.value} {escape_control(rule.value)}'.rstrip()}: {self.note}{was}"

    def shown(self) -> dict[str, Any]:
        rules = {name: rule and rule.shown() for name, rule in (("rule", self.rule), ("former", self.former))}
        return vars(self) | rules


def read_rules(link: Link, keys: Keys) -> Rulebook:
    """Read all rules. The version is read first: should they change in between, the leader hears of that, and they are
    read again."""
    version, stored = link.all_of([("HGET", keys.counters, "rules"), ("HGETALL", keys.rules)])
    return rulebook(stored, version or b"")


def rulebook(stored: Any, version: bytes = b"") -> Rulebook:
    return Rulebook((parse(field, value) for field, value in pairs(stored).items()), version)


class LiveRules:
    def __init__(self, link: Link, keys: Keys) -> None:
        self._link, self._keys, self._stream = link, keys, TicketStream(link, keys)

    def read(self) -> Rulebook:
        return read_rules(self._link, self._keys)

    def set(self, rule: Rule, by: By, what: str = "") -> RuleSetChange:
        """Make this the rule for its target. Raises TooManyRules, and what ``Link.call`` raises; after ReplyUnknown it
        is safe to ask again."""
        chosen = rule_id(rule.target, rule.value, rule.action is RuleAction.LIMIT)
        on = f"{rule.target.value} {rule.value}".rstrip()
        on += f": {rule.bounds}" if rule.bounds else ""
        action = OperatorAction(by, what or rule.action.value, on)
        reply = self._change(chosen, dump(rule), action)
        if reply[0] == b"FULL":
            raise TooManyRules(
                f"there are {MOST_RULES} rules already: lift some (`usher rules` lists them), or use a pattern"
            )
        held, is_exact = self._handed_over(rule)
        stored = self._link.call("HGET", self._keys.rules, chosen)
        # Somebody may have lifted it at this moment.
        now = parse(chosen.encode(), stored) if stored is not None else None
        word, former = reply[0].decode().lower(), self._former(chosen, reply)
        return RuleSetChange(word, int(reply[1]), now or rule, former, held, is_exact)

    def lift(self, chosen: str, by: By, what: str = "lift", version: int | None = None) -> RuleSetChange | None:
        """Take a rule away. Return None when there is none with this id, or of this version if one is given."""
        stored = self._link.call("HGET", self._keys.rules, chosen)
        former = None if stored is None else parse(chosen.encode(), stored)
        on = f"{former.target.value} {former.value}".rstrip() if former is not None else chosen
        reply = self._change(chosen, b"", OperatorAction(by, what, on), version=version)
        known = self._former(chosen, reply)
        return None if reply[0] == b"NONE" else RuleSetChange("lifted", int(reply[1]), None, known)

    def _former(self, chosen: str, reply: list[bytes]) -> Rule | None:
        return parse(chosen.encode(), reply[2]) if len(reply) > 2 and reply[2] else None

    def _change(self, chosen: str, stored: bytes, action: OperatorAction, version: int | None = None) -> Any:
        keys = self._keys
        args: list[Arg] = [chosen, stored, MOST_RULES, KEPT, "" if version is None else version, *action.line()]
        of_rules = (keys.rules, keys.counters, keys.changed, keys.actions)
        return self._link.run("change_rules", of_rules, args)

    def _handed_over(self, rule: Rule) -> tuple[int, bool]:
        """Count the messages in processing that the rule is about; and whether that is all of them. Only the leader
        knows which are a tenant's."""
        if rule.target is Target.TENANT:
            return 0, False
        if rule.target is Target.TICKET:
            record = self._stream.record_of(rule.value.encode("utf-8", "surrogateescape"))
            return (len(record.ids) if record is not None and b":" in record.owner else 0), True
        if rule.target is not Target.PATTERN:
            try:
                group = self._stream.pending_counts()
            except (GroupMissing, CommandRefused):
                return 0, True
            of = rule.value.encode() + b":" if rule.target is Target.CONSUMER else b""
            held = [count for name, count in group.items() if name not in (MASTER, HALTED) and name.startswith(of)]
            return sum(held), True
        count = 0
        for number, (ticket, found) in enumerate(self._stream.records(), 1):
            if found is not None and b":" in found.owner and rule.fits(text_of(ticket)):
                count += len(found.ids)
            if number >= _MOST_COUNTED:
                return count, False
        return count, True
