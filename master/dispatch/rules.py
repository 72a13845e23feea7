"""Rule work: reads the live rules for the leader, and ends the messages that they condemn. It has no thread: the
dispatcher gives it turns, because it changes the board."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from usher.common.base.log import event
from usher.common.protocol.keys import Keys
from usher.common.redis.client import Link
from usher.master.leader.leader_scripts import LeaderScripts, Rejected, RulesMoved
from usher.master.operations.live_rules import read_rules
from usher.master.policy.board.board import Board
from usher.master.policy.rules import Target

log = logging.getLogger(__name__)

#: Dead letters written by one script call.
_PAGE = 500
#: The reason of dead letters that a rule asked for.
RULE = "rule"


class RuleWork:
    """Work on live rules, done on the dispatcher's thread over its link."""

    def __init__(self, link: Link, keys: Keys, has_tenants: bool) -> None:
        """Make the work. ``has_tenants``: tickets have tenants."""
        self._link = link
        self._keys = keys
        self._has_tenants = has_tenants

    def read(self, board: Board, steps: LeaderScripts) -> None:
        """Read the rules and have the board follow them."""
        rules = read_rules(self._link, self._keys)
        if rules.version != steps.rules_version:
            event(log, "rules_loaded", count=len(rules.rules), version=rules.version)
            for rule in rules.rules:
                if not rule.version:
                    event(
                        log,
                        "rule_unreadable",
                        level=logging.ERROR,
                        rule=rule.id,
                        why="everything is paused until it is lifted",
                    )
                elif rule.target is Target.TENANT and not self._has_tenants:
                    why = "no tenants without USHER_TENANT_FIELD"
                    event(log, "rule_without_effect", level=logging.WARNING, rule=rule.id, why=why)
        board.follow(rules)
        steps.rules_version = rules.version

    def has_moved(self, steps: LeaderScripts) -> bool:
        """Return whether the rules have changed since they were read. An announcement may get lost, so this is checked
        from time to time."""
        return (self._link.call("HGET", self._keys.counters, "rules") or b"") != steps.rules_version

    def turn(
        self,
        board: Board,
        steps: LeaderScripts,
        unsure: set[bytes],
        ended: Callable[[Sequence[Rejected]], None],
        follow: Callable[[], None],
    ) -> bool:
        """Write one page of dead letters by rule. Return False when there are none. Tickets to read again are added to
        ``unsure``. ``follow`` is called when the rules have changed meanwhile: it reads them, and applies them to
        consumers too."""
        condemned = board.condemned(_PAGE)
        if not condemned:
            return False
        try:
            written, refused = steps.end_by_rule(condemned)
        except RulesMoved:
            follow()
            return True
        unsure.update(board.buried(written, refused))
        ended([Rejected(entry_id, doomed.ticket, RULE) for doomed in written for entry_id in doomed.ids])
        return True
