"""What the rig reads at the end: the state in Redis, the dead letters, and what the programs' logs say happened."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.chaos.checker.history import position
from tests.chaos.rig.producer import STREAM
from tests.chaos.rig.wire import Refused, Unknown, Wire, mapping

GROUP = "chaos_group"
PREFIX = "{" + STREAM + "}:" + GROUP + ":"
#: What several streams are gathered into, and what its keys begin with.
WORK_STREAM = "usher:{" + GROUP + "}"
WORK_PREFIX = f"{WORK_STREAM}:{GROUP}:"
#: Keys that may stay when all is quiet, whatever happened.
STAYING = (
    "tickets", "consumers", "leader", "epoch", "taken", "counters", "attempts", "noted:errors", "noted:failed",
    "letters", "position", "dead", "runs", "changed", "shares", "gathered", "actions", "losses", "charts", "reports",
    "rules",
)  # fmt: skip


class State:
    """Looks at the ticket stream from outside, over a connection of its own; used by one thread. ``sources``: streams
    that are gathered."""

    def __init__(self, port: int, sources: Sequence[str] = ()) -> None:
        self._wire = Wire(port)
        self._sources = sources or ()
        self.stream, self.prefix = (WORK_STREAM, WORK_PREFIX) if sources else (STREAM, PREFIX)

    def close(self) -> None:
        self._wire.close()

    def call(self, *command: Any) -> Any:
        """A command that may be repeated: the connection may be to a server that was killed since."""
        try:
            return self._wire.call(*command)
        except Unknown:
            return self._wire.call(*command)

    def pending(self) -> int:
        """Entries pending in the group; -1 when there is no group or no answer."""
        facts = self._group()
        return -1 if facts is None else int(facts[b"pending"])

    def lag(self) -> int:
        """Entries that the group has not read, or that a leader has read and not handed over."""
        found = 0
        for stream in (*self._sources, self.stream):
            facts = self._group(stream)
            if facts is None and stream == self.stream:
                return -1
            above = facts[b"last-delivered-id"].decode() if facts else "0-0"
            if stream == self.stream and (taken := self.call("GET", self.prefix + "taken")):
                above = min(above, taken.decode().partition(" ")[0], key=position)
            found += len(self.call("XRANGE", stream, "(" + above, "+"))
        return found

    def _group(self, stream: str = "") -> dict[bytes, Any] | None:
        with contextlib.suppress(Refused, Unknown):
            for group in map(mapping, self.call("XINFO", "GROUPS", stream or self.stream)):
                if group[b"name"] == GROUP.encode():
                    return group
        return None

    def is_quiet(self) -> bool:
        """Asked in the order in which entries go: what is read between two questions would else be in neither
        answer."""
        with contextlib.suppress(Refused, Unknown):
            return self.lag() == 0 and self.pending() == 0
        return False

    def pending_by_name(self) -> dict[str, int]:
        """Entries pending for each name of the group."""
        with contextlib.suppress(Refused, Unknown):
            rows = map(mapping, self.call("XINFO", "CONSUMERS", self.stream, GROUP))
            return {row[b"name"].decode(): int(row[b"pending"]) for row in rows}
        return {}

    def leader_url(self) -> str:
        """Where the leader says that it is reached; "" when nobody leads."""
        with contextlib.suppress(Refused, Unknown):
            held = self.call("GET", self.prefix + "leader")
            return held.decode().rpartition(" ")[2] if held else ""
        return ""

    def living(self) -> list[str]:
        """Incarnations that are registered and have a lease."""
        found = []
        for name, stored in mapping(self.call("HGETALL", self.prefix + "consumers")).items():
            incarnation = f"{name.decode()}:{stored.decode().split(' ', 1)[0]}"
            if self.call("EXISTS", f"{self.prefix}lease:{incarnation}"):
                found.append(incarnation)
        return found

    def leftovers(self) -> dict[str, Any]:
        """For the record ``final``."""
        live = self.living()
        kept = {self.prefix + name for name in STAYING} | {
            f"{self.prefix}{kind}:{name}" for kind in ("lease", "inbox") for name in live
        }
        rows = map(mapping, self.call("XINFO", "CONSUMERS", self.stream, GROUP))
        return {
            "pel": self.pending(),
            "lag": self.lag(),
            "tickets": int(self.call("HLEN", self.prefix + "tickets")),
            "attempts": int(self.call("HLEN", self.prefix + "attempts")),
            "members": [row[b"name"].decode() for row in rows],
            "live": live,
            "keys": sorted(set(self._keys()) - kept),
        }

    def _keys(self) -> Iterable[str]:
        cursor = b"0"
        while True:
            cursor, found = self.call("SCAN", cursor, "MATCH", self.prefix.replace("[", "\\[") + "*", "COUNT", 1000)
            yield from (key.decode() for key in found)
            if cursor == b"0":
                return

    def dead_letters(self) -> list[dict[str, Any]]:
        """All dead letters: uid (the stream id if the message had none), id, attempts, reason."""
        letters = []
        for _, flat in self.call("XRANGE", self.prefix + "dead", "-", "+"):
            fields: dict[bytes, bytes] = {}
            for at in range(0, len(flat), 2):
                fields.setdefault(flat[at], flat[at + 1])
            mid = fields[b"usher-id"].decode()
            uid = fields.get(b"uid")
            if self._sources and uid is not None and b"usher_from" in fields:  # as producer and handler tell it
                mid, _, source = fields[b"usher_from"].decode().split(" ", 2)
                uid = f"{source}/".encode() + uid
            told = uid.decode(errors="replace") if uid is not None else ""
            attempts, reason = int(fields[b"usher-attempts"]), fields[b"usher-reason"].decode()
            letters.append({"mid": mid, "uid": told, "attempts": attempts, "reason": reason})
        return letters


#: Actions of the log that are counted, by the name of the counter.
_ACTIONS = {
    "leader_elected": "elections", "leader_fenced": "leaders_fenced", "leadership_uncertain": "in_doubt",
    "takeover_completed": "adoptions", "consumer_recovered": "recovered", "orphaned_entries_found": "strays_found",
    "worker_leaves": "incarnations_ended", "report_dropped": "reports_dropped", "lease_revoked": "revoked",
    "lease_not_renewed": "renewals_failed", "service_retrying": "turns_failed", "handler_stuck": "handlers_hung",
    "messages_rejected": "rejected", "group_lost": "group_lost", "consumer_registered": "incarnations",
    "shards_assigned": "shares_changed", "source_group_created": "source_groups_made",
    "lease_too_long": "leases_clamped", "leadership_lease_too_long": "leads_clamped",
    "waiting_limit_reached": "read_ahead",
}  # fmt: skip


def events(logs: Iterable[Path], action: str) -> list[dict[str, Any]]:
    """All log records of an action."""
    found = []
    for path in logs:
        for line in path.read_text("utf-8", "replace").splitlines():
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                if isinstance(record, dict) and record.get("event") == action:
                    found.append(record)
    return found


def count_logs(logs: Iterable[Path]) -> Counter[str]:
    """Counters from the programs' JSON logs. Refused acknowledgements and renewals are told by the words of the
    refusal."""
    counts: Counter[str] = Counter()
    for path in logs:
        for line in path.read_text("utf-8", "replace").splitlines():
            if not line.startswith("{"):
                counts["unstructured_lines"] += bool(line.strip())
                continue
            with contextlib.suppress(ValueError):
                _count(json.loads(line), counts)
    counts["leader_changes"] = max(0, counts["elections"] - 1)
    return counts


def _count(record: dict[str, Any], counts: Counter[str]) -> None:
    action = record.get("event", "")
    if action in _ACTIONS:
        counts[_ACTIONS[action]] += 1
    why = record.get("why", "")
    if action == "worker_leaves" and ("had ended" in why or "has ended" in why or "revoked" in why):
        counts["refused"] += 1  # what a stale owner asked of Redis: to renew, to acknowledge
        counts["refused_acks"] += "has ended" in why
    elif action == "consumer_drained":
        counts["drained" if record.get("clean") else "drained_badly"] += 1
        counts["given_back"] += int(record.get("given_back", 0))
    elif action == "service_retrying":
        for word in ("LOADING", "OOM", "MISCONF", "READONLY", "NOSCRIPT", "BUSY"):
            counts[word] += word in record.get("problem", "")
    elif action == "tickets_recalled":
        counts["recalled"] += int(record.get("count", 0))
    if record.get("level") == "ERROR":
        counts["errors"] += 1
