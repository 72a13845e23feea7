"""Alarms: the things that need attention, one sentence each, the worst first, for a person on call. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from usher.common.base.text import pluralize
from usher.common.doctor.judgements import NEARLY_FULL
from usher.common.protocol.ticket_states import TicketState
from usher.master.policy.explain.stuck import FURTHER
from usher.master.policy.states import BAD, BY_NAME, WARN

#: Number of unread messages, and age of the oldest one, above which an alarm says that consumers are behind.
_LAG, _OLD_MS = 1_000, 60_000
#: A handler may take its time: only above this age, or with this many attempts, somebody has to act.
_STILL_MS, _ATTEMPTS = 60_000, 3
#: Seconds for which an alarm tells what somebody did to the stream.
_RECENT_S = 86_400
#: Declared losses of the group itself; of others there are alarms anyway.
_OF_GROUP = ("group_lost", "set_back")
OK = "ok"
_WORDS = {BAD: "Critical", WARN: "Warning", OK: "OK"}


def _alarm(level: str, text: str, href: str) -> dict[str, str]:
    """Return an alarm. ``level``: bad, warn or ok; ``word`` is the same for people; ``href``: the page with more, or
    ""."""
    return {"level": level, "word": _WORDS[level], "text": text, "href": href}


def level_of(group: Mapping[str, Any], now_ms: int) -> str:
    """Return the level of a group of stuck tickets. What an operator has paused waits for that operator, what is queued
    for its turn, and what asked to be called later has not failed."""
    state = BY_NAME.get(group["state"])
    if group["alike"] or (state is not None and state.severity == BAD):
        return BAD
    is_calm = group["state"] in (TicketState.PAUSED, TicketState.QUEUED, TicketState.PUT_OFF, FURTHER)
    tries = max((row["attempts"] for row in group["rows"] if not row["put_off"]), default=0)
    is_old = any(not row["put_off"] and now_ms - row["since_ms"] >= _STILL_MS for row in group["rows"])
    return BAD if not is_calm and (is_old or tries >= _ATTEMPTS) else WARN


def alarms(seen: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the alarms of a snapshot of the pulse, beside its groups of stuck tickets; when there is neither, one that
    says that all is well."""
    of_rules = [_alarm(WARN, f"All tickets are {told}", "/rules") for told in seen["broad_rules"]]
    found = [*_of_programs(seen), *_of_stream(seen), *_of_tickets(seen), *of_rules, *_of_flow(seen)]
    if not (found or seen["groups"]):
        return [_alarm(OK, _calm(seen), "/dead-letters" if seen["dead_letters"] else "")]
    return sorted(found, key=lambda one: one["level"] != BAD)


def _of_programs(seen: Mapping[str, Any]) -> list[dict[str, str]]:
    states = seen["consumers"]
    found = []
    # This comes first: leases cannot be renewed either, so the others follow from it.
    if (trouble := seen["write_trouble"]) is not None:
        found.append(
            _alarm(BAD if trouble["is_certain"] or seen["leader_url"] is None else WARN, trouble["text"], "/doctor")
        )
    elif (share := seen.get("memory_share") or 0.0) >= NEARLY_FULL:
        text = f"{share:.0%} of Redis' memory is used; when all is, nothing can be sent"
        found.append(_alarm(WARN, text, "/streams"))
    if seen["leader_url"] is None:
        found.append(_alarm(BAD, "No master leads: nothing is handed over", "/doctor"))
    if not states["live"]:
        some = states["draining"] or states["paused"]
        waits = "those that drain or are paused take nothing more" if some else "nothing is handled"
        found.append(_alarm(BAD, f"No consumer is live: {waits}", "/consumers"))
    for state, says in (("lost", "lost; their messages are being taken back"), ("revoked", "not answering over HTTP")):
        if states[state]:
            found.append(_alarm(WARN, f"{pluralize(states[state], 'consumer')} {says}", "/consumers"))
    return found


def _of_stream(seen: Mapping[str, Any]) -> list[dict[str, str]]:
    told, since_s = seen["mishaps"], seen["time_ms"] / 1000 - _RECENT_S
    found = []
    if told["unread_cut"] and told["unread_cut_s"] > since_s:
        text = f"Cut from the stream before they were read, and lost: {pluralize(told['unread_cut'], 'message')}"
        found.append(_alarm(BAD, text, "/doctor"))
    recent = [one for one in seen.get("losses", ()) if one["ms"] / 1000 > since_s]
    found += [_alarm(BAD, f"Declared: {one['text']}", "/streams") for one in recent if one["kind"] in _OF_GROUP][:1]
    return found


def _of_tickets(seen: Mapping[str, Any]) -> list[dict[str, str]]:
    if not seen["halted"] or any(group["state"] == TicketState.HALTED for group in seen["groups"]):
        return []  # else they are not among those that were looked at yet
    told = f"{pluralize(seen['halted'], 'ticket')} halted by a dead letter: redrive or drop it"
    return [_alarm(BAD, told, "/dead-letters")]


def _of_flow(seen: Mapping[str, Any]) -> list[dict[str, str]]:
    # of what is pending; also None without a group, where the number of unread entries is unknown
    oldest_ms = seen["oldest_ms"]
    found = [_alarm(BAD, seen["sudden"], "/dead-letters")] if seen.get("sudden") else []
    found += [_alarm(WARN, seen["letters_wrong"], "/dead-letters")] if seen.get("letters_wrong") else []
    is_queued = any(group["state"] == TicketState.QUEUED for group in seen["groups"])  # which says behind what
    if seen["lag"] >= _LAG and not is_queued and oldest_ms and seen["time_ms"] - oldest_ms >= _OLD_MS:
        lag = f"{'' if seen['lag_is_exact'] else 'more than '}{seen['lag']:,}"
        found.append(_alarm(WARN, f"The consumers are behind: {lag} messages are unread", "/consumers"))
    return found


def _calm(seen: Mapping[str, Any]) -> str:
    letters, live = seen["dead_letters"], pluralize(seen["consumers"]["live"], "consumer")
    told = f"; {pluralize(letters, 'dead letter')} {'waits' if letters == 1 else 'wait'}" if letters else ""
    return f"Nothing is stuck. {live} live{told}"
