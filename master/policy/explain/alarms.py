"""Alarms: the things that need attention, one sentence each, the worst first, for a person on call. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import urlencode

from usher.common.base.text import pluralize
from usher.common.doctor.judgements import NEARLY_FULL

#: Number of unread messages, and age of the oldest one, above which an alarm says that consumers are behind.
_LAG, _OLD_MS = 1_000, 60_000
#: A handler may take its time: only above this age, or with this many attempts, somebody has to act.
_STILL_MS, _ATTEMPTS = 60_000, 3
#: This many owners in a row that were lost with the same message are no accident.
_LOST = 2
#: Seconds for which an alarm tells what somebody did to the stream.
_RECENT_S = 86_400
#: Declared losses of the group itself; of others there are alarms anyway.
_OF_GROUP = ("group_lost", "set_back")
#: What an operator has stopped, or a dead letter, or what waits for its turn, has alarms of its own; of further groups
#: the states are not known.
_NOT_STILL = ("halted", "paused", "queued", "further")
BAD, WARN, OK = "bad", "warn", "ok"
_WORDS = {BAD: "Critical", WARN: "Warning", OK: "OK"}


class Alarm(NamedTuple):
    """An alarm. ``level``: bad, warn or ok; ``word`` is the same for people; ``href``: the page with more, or ""."""

    level: str
    text: str
    href: str

    def row(self) -> dict[str, str]:
        return {"level": self.level, "word": _WORDS[self.level], "text": self.text, "href": self.href}


def alarms(seen: Mapping[str, Any]) -> list[Alarm]:
    """Return the alarms of a snapshot of the pulse; when there are none, one that says that all is well."""
    of_rules = [Alarm(WARN, f"All tickets are {told}", "/rules") for told in seen["broad_rules"]]
    found = [*_of_programs(seen), *_of_stream(seen), *_of_tickets(seen), *of_rules, *_of_flow(seen)]
    return sorted(found, key=lambda one: one.level != BAD) or [
        Alarm(OK, _calm(seen), "/dead-letters" if seen["dead_letters"] else "")
    ]


def _of_programs(seen: Mapping[str, Any]) -> list[Alarm]:
    states = seen["consumers"]
    found = []
    # This comes first: leases cannot be renewed either, so the others follow from it.
    if (trouble := seen["write_trouble"]) is not None:
        found.append(
            Alarm(BAD if trouble["is_certain"] or seen["leader_url"] is None else WARN, trouble["text"], "/doctor")
        )
    elif (share := seen.get("memory_share") or 0.0) >= NEARLY_FULL:
        text = f"{share:.0%} of Redis' memory is used; when all is, nothing can be sent"
        found.append(Alarm(WARN, text, "/streams"))
    if seen["leader_url"] is None:
        found.append(Alarm(BAD, "No master leads: nothing is handed over", "/doctor"))
    if not states["live"]:
        some = states["draining"] or states["paused"]
        waits = "those that drain or are paused take nothing more" if some else "nothing is handled"
        found.append(Alarm(BAD, f"No consumer is live: {waits}", "/consumers"))
    for state, says in (("lost", "lost; their messages are being taken back"), ("revoked", "not answering over HTTP")):
        if states[state]:
            found.append(Alarm(WARN, f"{pluralize(states[state], 'consumer')} {says}", "/consumers"))
    return found


def _of_stream(seen: Mapping[str, Any]) -> list[Alarm]:
    told, since_s = seen["mishaps"], seen["time_ms"] / 1000 - _RECENT_S
    found = []
    if told["unread_cut"] and told["unread_cut_s"] > since_s:
        text = f"Cut from the stream before they were read, and lost: {pluralize(told['unread_cut'], 'message')}"
        found.append(Alarm(BAD, text, "/doctor"))
    recent = [one for one in seen.get("losses", ()) if one["ms"] / 1000 > since_s]
    found += [Alarm(BAD, f"Declared: {one['text']}", "/streams") for one in recent if one["kind"] in _OF_GROUP][:1]
    return found


def _of_tickets(seen: Mapping[str, Any]) -> list[Alarm]:
    found = []
    halted = [row for row in seen["stuck"] if row["state"] == "halted"]
    # A ticket that an operator has paused waits for that operator, not for the reader of this.
    paused = [row for row in seen["stuck"] if row["state"] == "paused"]
    still = [row for row in seen["stuck"] if row["state"] not in _NOT_STILL and not row.get("alike")]
    alike = [group for group in seen.get("groups", ()) if group.get("alike")]
    found += [Alarm(BAD, f"What handlers need is away: {group['told']}", "/tickets") for group in alike]
    if halted or seen["halted"]:
        told = pluralize(max(len(halted), seen["halted"]), "ticket")
        found.append(Alarm(BAD, f"{told} halted by a dead letter: redrive or drop it", "/dead-letters"))
    if still:
        first = still[0]
        more = len(seen["stuck"]) >= seen["stuck_most"]
        groups = [one for one in seen.get("groups", ()) if one["state"] not in _NOT_STILL and one not in alike]
        known = sum(one["tickets"] for one in groups)
        count = (
            f"{max(len(still), known):,} tickets or more are"
            if more
            else f"{pluralize(len(still), 'ticket')} {'is' if len(still) == 1 else 'are'}"
        )
        on = f" on {first['consumer']}" if first["consumer"] else ""
        tries = f", {pluralize(first['attempts'], 'attempt')}" if first["attempts"] else ""
        behind = (
            f", {'' if first['behind_is_exact'] else 'at least '}{first['behind']:,} behind" if first["behind"] else ""
        )
        # A message that asked to be called later has not gone wrong.
        acts = any(
            not row["put_off"] and (seen["time_ms"] - row["since_ms"] >= _STILL_MS or row["attempts"] >= _ATTEMPTS)
            for row in still
        )
        text = f"{count} stuck or retrying; the oldest: {first['shown']}{on}{tries}{behind}"
        found.append(Alarm(BAD if acts else WARN, text, first["href"]))
    if (lost := [row for row in still if row["owners_lost"] >= _LOST]) != []:
        row = max(lost, key=lambda one: int(one["owners_lost"]))
        text = f"{row['shown']}: {row['head']} may end or freeze its process"
        found.append(Alarm(BAD, f"{text}. The last {row['owners_lost']} processes ended meanwhile.", row["href"]))
    if paused:
        told = pluralize(len(paused), "paused ticket") + " or more" * (len(seen["stuck"]) >= seen["stuck_most"])
        text = f"{told} with messages that wait; the oldest: {paused[0]['shown']}"
        found.append(Alarm(WARN, text, paused[0]["href"]))
    return found


def _of_flow(seen: Mapping[str, Any]) -> list[Alarm]:
    queue = seen.get("queue")
    if queue and any(row["state"] == "queued" for row in seen["stuck"]):
        text = f"Tickets wait for their turn, {queue['text']}"
        href = "/rules?" + urlencode({"tenant": queue["tenant"]}) if queue["tenant"] else "/consumers"
        return [Alarm(WARN, text, href)]
    # of what is pending; also None without a group, where the number of unread entries is unknown
    oldest_ms = seen["oldest_ms"]
    found = [Alarm(BAD, seen["sudden"], "/dead-letters")] if seen.get("sudden") else []
    found += [Alarm(WARN, seen["letters_wrong"], "/dead-letters")] if seen.get("letters_wrong") else []
    if seen["lag"] >= _LAG and oldest_ms and seen["time_ms"] - oldest_ms >= _OLD_MS:
        lag = f"{'' if seen['lag_is_exact'] else 'more than '}{seen['lag']:,}"
        found.append(Alarm(WARN, f"The consumers are behind: {lag} messages are unread", "/consumers"))
    return found


def _calm(seen: Mapping[str, Any]) -> str:
    letters, live = seen["dead_letters"], pluralize(seen["consumers"]["live"], "consumer")
    told = f"; {pluralize(letters, 'dead letter')} {'waits' if letters == 1 else 'wait'}" if letters else ""
    return f"Nothing is stuck. {live} live{told}"
