"""Judge a ticket stream: can it take messages, is it being read, are there leftovers. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from usher.common.doctor.facts import (
    DoctorFacts,
    DoctorFinding,
    DoctorSeverity,
    NameInGroup,
    ProofFacts,
    TicketStreamFacts,
)
from usher.common.doctor.growth import describe
from usher.common.protocol.stream_id import rank

OK, UNKNOWN, WARN, BAD = DoctorSeverity.OK, DoctorSeverity.UNKNOWN, DoctorSeverity.WARN, DoctorSeverity.BAD
_LAST_RANK = (1 << 128) - 1
#: Milliseconds ahead of Redis' clock from which an id was made by a sender, not by a clock that was set back a little.
_POISONED_MS = 3_600_000
_AHEAD_MS = 1000
_SHOWN = 5
_RECENT_S = 86_400
#: Days of growth that Redis has room for, below which somebody must act if nothing is trimmed.
_SOON_DAYS = 7
#: So many times longer than the time between two runs the run log should hold.
_SPARE = 2
_SOONER = "prove more often (USHER_AUDIT_PROVE_MINUTES, usher audit --schedule prove), or raise USHER_RUN_LOG_LENGTH"
_FASTER = (
    "proving more often does not help: raise USHER_RUN_LOG_LENGTH, so that what each run costs, however little is new,"
    " is for more executions; if a run still takes longer than half of what the log holds, give it more cores, or Spark"
    " on a cluster (USHER_AUDIT_ENGINE=spark, USHER_AUDIT_SPARK_MASTER)"
)


def judge_stream(facts: DoctorFacts) -> Iterator[DoctorFinding]:
    stream = facts.stream
    if stream is None:
        why = facts.why_not("stream")
        yield DoctorFinding(
            "stream",
            UNKNOWN,
            why,
            "nothing is known of the ticket stream",
            "allow XINFO and reading Usher's keys to this user",
        )
        return
    if stream.wrong_type:
        means = "producers and master get WRONGTYPE: nothing works"
        yield DoctorFinding(
            "stream",
            BAD,
            f"{stream.name} is a {stream.wrong_type}",
            means,
            "set another USHER_TICKET_STREAM, or move that key away",
        )
        return
    lag = "unread not counted" if stream.lag is None else f"{stream.lag:,} unread"
    seen = (
        f"{stream.name}: {stream.entries:,} entries, {lag}"
        if stream.last_generated
        else f"{stream.name} does not exist yet"
    )
    yield DoctorFinding(
        "stream", OK, seen, "producers can add to it" if stream.last_generated else "the first message creates it"
    )
    yield from _ids(facts, stream)
    yield from _group(stream)
    yield from _leader(stream)
    yield from _consumers(stream)
    yield from _idle(facts, stream)
    yield from _log(facts, stream)
    yield from _mishaps(facts, stream)
    yield from _losses(facts, stream)
    yield from _growth(stream)
    if stream.proof is not None:
        yield from judge_proof(stream.proof)
    if stream.dead_letters:
        yield DoctorFinding(
            "dead letters",
            WARN,
            f"{stream.dead_letters:,}",
            "messages that were given up, with their reasons",
            "usher dead list",
        )


def _log(facts: DoctorFacts, stream: TicketStreamFacts) -> Iterator[DoctorFinding]:
    """Judge the durability of an outbox: its rows go when Redis has answered, so what Redis loses after that exists
    nowhere else."""
    if not stream.is_log:
        return
    fsync = facts.setting("appendfsync") if facts.told("aof_enabled") != "0" else None
    if fsync == "always":
        yield DoctorFinding(
            "log", OK, "an outbox is streamed here, appendfsync always", "what left the outbox is on disk"
        )
        return
    seen = f"an outbox is streamed here, appendfsync {fsync or 'not known, or no append-only file'}"
    means = (
        "rows leave the outbox when Redis answers: a power loss may take what was not on disk yet, and it exists"
        " nowhere else"
    )
    yield DoctorFinding(
        "log",
        WARN,
        seen,
        means,
        "set appendfsync always (deploy/redis.conf), or USHER_OUTBOX_WAIT_AOF with Redis 7.2 or later",
    )


#: No right of Redis tells options of a command apart.
_IDS_FINE = "ids follow Redis' clock; whoever may XADD can end that with an id of their own, and cut with MAXLEN"


def _ids(facts: DoctorFacts, stream: TicketStreamFacts) -> Iterator[DoctorFinding]:
    if not stream.last_generated or facts.clock is None:
        return
    last = rank(stream.last_generated.encode())
    ahead_ms = (last >> 64) - facts.clock.redis_ms
    do = "stop the sender of such ids; then deploy/runbook.md, The stream takes no more ids"
    if last == _LAST_RANK:
        yield DoctorFinding(
            "ids",
            BAD,
            f"the last id is {stream.last_generated}",
            "no id is left: no message can ever be added again",
            do,
        )
    elif ahead_ms > _POISONED_MS:
        means = "a sender chose an id of the future: all later ones are pinned to it, and times in them say nothing"
        yield DoctorFinding(
            "ids",
            BAD,
            f"the last id is {stream.last_generated}, {ahead_ms / 3_600_000:,.1f} hours ahead of Redis' clock",
            means,
            do,
        )
    elif ahead_ms > _AHEAD_MS:
        means = "Redis' clock went back, or a sender chose this id; ids go on growing, so the order holds"
        yield DoctorFinding(
            "ids",
            WARN,
            f"the last id is {ahead_ms / 1000:,.1f} s ahead of Redis' clock",
            means,
            "look at the clock of Redis' host",
        )
    else:
        yield DoctorFinding("ids", OK, f"the last id is {stream.last_generated}", _IDS_FINE)


def _group(stream: TicketStreamFacts) -> Iterator[DoctorFinding]:
    if stream.has_group:
        yield DoctorFinding("group", OK, f"{stream.pending:,} entries pending", "the group is there")
    elif stream.position_saved:
        means = (
            "the group or the stream was destroyed; a leader makes it again where it was and says what may repeat or"
            " is lost"
        )
        do = "see that a master runs, and look for `group_lost` in its log"
        yield DoctorFinding("group", WARN if stream.leader else BAD, "the group is gone", means, do)
    elif stream.entries:
        means = "no master has ever read this stream; the first one begins with its first entry"
        yield DoctorFinding(
            "group", WARN, "there is no group", means, "start a master; see that USHER_GROUP is the same everywhere"
        )


def _waits(stream: TicketStreamFacts) -> bool:
    """Return True when entries wait. ``lag`` None: some are unread, but their number is not known."""
    return stream.pending > 0 or stream.lag is None or stream.lag > 0


def _leader(stream: TicketStreamFacts) -> Iterator[DoctorFinding]:
    waiting = _waits(stream) or (stream.entries and not stream.has_group)
    if stream.leader:
        yield DoctorFinding("leader", OK, stream.leader, "a master reads and hands over")
    elif waiting:
        yield DoctorFinding("leader", BAD, "none", "entries wait and are not handed over", "start a master")
    else:
        yield DoctorFinding(
            "leader", WARN, "none", "nothing waits, but new entries would not be handed over", "start a master"
        )


def _consumers(stream: TicketStreamFacts) -> Iterator[DoctorFinding]:
    if stream.living:
        yield DoctorFinding("consumers", OK, f"{stream.living} alive", "handlers can run")
    elif _waits(stream):
        yield DoctorFinding(
            "consumers",
            BAD,
            "none is alive",
            "entries wait and cannot run; nothing is lost",
            "start consumers",
        )
    else:
        yield DoctorFinding("consumers", WARN, "none is alive", "what is sent waits until one comes", "start consumers")
    dead = [name for name in stream.names if name.state == "lost" and name.pending]
    if dead:
        severity = WARN if stream.leader else BAD
        means = "their leases have ended; " + (
            "the leader takes their entries back" if stream.leader else "no leader takes their entries back"
        )
        yield DoctorFinding("dead consumers", severity, _listed(dead), means, "" if stream.leader else "start a master")
    strangers = [name for name in stream.names if name.state == "unknown" and name.pending]
    if strangers:
        means = (
            "another program has read from Usher's group; the sweep takes these entries back after two leases, and"
            " order may suffer"
        )
        yield DoctorFinding("strangers", WARN, _listed(strangers), means, "let other programs use a group of their own")


def _mishaps(facts: DoctorFacts, stream: TicketStreamFacts) -> Iterator[DoctorFinding]:
    """Judge what somebody did to the stream or its pending list by hand; for a day it is a reason to act."""
    told, now_s = stream.mishaps, facts.clock.redis_ms // 1000 if facts.clock is not None else 0
    if cut := told.unread_cut + stream.unread_cut:
        is_new = bool(stream.unread_cut) or now_s - told.unread_cut_s < _RECENT_S
        yield DoctorFinding(
            "unread entries",
            BAD if is_new else OK,
            f"{cut:,} were cut before they were read" + ("" if is_new else ", none of them in the last day"),
            "these messages were sent and never handled, and no letter tells of them",
            "send them again; trim with `usher trim` alone: no MAXLEN or MINID in producers, no XTRIM"
            if is_new
            else "",
        )
    elif not stream.counts_added:
        yield DoctorFinding(
            "unread entries",
            OK,
            "this server does not count what is added",
            "entries that are cut before they are read leave no trace before Redis 7",
        )
    if told.restored:
        is_new = now_s - told.restored_s < _RECENT_S
        yield DoctorFinding(
            "pending entries",
            WARN if is_new else OK,
            f"{told.restored:,} were claimed again" + ("" if is_new else ", none of them in the last day"),
            "somebody acknowledged them by hand, or deleted names from the group; they are handled all the same",
            "find who did it (ACL LOG, MONITOR): where no master has seen them, nobody claims them again"
            if is_new
            else "",
        )


def _losses(facts: DoctorFacts, stream: TicketStreamFacts) -> Iterator[DoctorFinding]:
    """Tell the newest declared losses; within a day they are a reason to look."""
    now_ms = facts.clock.redis_ms if facts.clock is not None else 0
    for moment, loss in stream.losses:
        is_new = now_ms - loss.ms < 1000 * _RECENT_S
        yield DoctorFinding(
            "declared loss",
            WARN if is_new else OK,
            f"{moment}: {loss.describe()}",
            "the masters found it and wrote it down; the audit tells it from a promise that was broken",
            "see Lost group in the runbook" if is_new else "",
        )


def _growth(stream: TicketStreamFacts) -> Iterator[DoctorFinding]:
    if stream.grows is None and not stream.trim_held_back:
        return
    left = None if stream.grows is None else stream.grows.days_left
    seen = describe(stream.grows) if stream.grows is not None else "slowly"
    room = "" if left is None else f"; Redis has room for {left:,.1f} days of it"
    do = ""
    if stream.trims_after_s is None:
        means, do = "no leader trims: what is done stays", "set USHER_TRIM_KEEP of the masters, or `usher trim`"
    elif stream.trim_held_back:
        means, do = f"it is not trimmed: {stream.trim_held_back}", "`usher trim` shows who needs what"
    else:
        hours = stream.trims_after_s / 3600
        means = f"what nobody needs goes after {hours:,.4g} h, and earlier when memory is needed"
    is_soon = bool(do) and left is not None and left < _SOON_DAYS
    yield DoctorFinding("growth", WARN if is_soon else OK, seen + room, means, do)


def _listed(names: list[NameInGroup]) -> str:
    few = ", ".join(f"{name.name} ({name.pending:,} pending)" for name in names[:_SHOWN])
    return few + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _idle(facts: DoctorFacts, stream: TicketStreamFacts) -> Iterator[DoctorFinding]:
    if stream.idle_ms > 2 * facts.lease_ms:
        seen = f"for {stream.idle_ms / 1000:,.1f} s, with leases of {facts.lease_ms / 1000:g} s"
        means = (
            "a living consumer touches what it holds with every renewal; is USHER_LEASE_SECONDS the same everywhere?"
        )
        yield DoctorFinding("idle entries", WARN, seen, means, "compare USHER_LEASE_SECONDS of masters and consumers")


def judge_proof(facts: ProofFacts) -> Iterator[DoctorFinding]:
    held = f"the run log holds {facts.held_ms / 1000:,.0f} s"
    is_slow = _SPARE * facts.took_ms > facts.held_ms
    took = f"; it took {facts.took_ms / 1000:,.0f} s" if is_slow else ""
    do = _FASTER if is_slow else _SOONER
    if facts.unproven_ms is None:
        yield DoctorFinding(
            "proof",
            WARN,
            f"{held}, which is all that `usher audit` looks at",
            "what was cut from the log between two audits is proven by nobody",
            "let `usher audit --schedule prove` run (the program proof), which proves all of history",
        )
    elif rank(facts.archived) < rank(facts.first):
        yield DoctorFinding(
            "proof",
            WARN,
            f"{held}, and the last proof is {facts.unproven_ms / 1000:,.0f} s old{took}",
            "executions since then may have been cut from the log before they were archived: they will not be proven",
            do,
        )
    elif _SPARE * max(facts.every_ms, facts.took_ms) > facts.held_ms:
        yield DoctorFinding(
            "proof",
            WARN,
            f"{held}, and proofs are {facts.every_ms / 1000:,.0f} s apart{took.replace('it took', 'the last took')}",
            "with a little more traffic executions are cut from the log before they are archived: a hole in the proof",
            do,
        )
    else:
        yield DoctorFinding(
            "proof",
            OK,
            f"proven until {facts.unproven_ms / 1000:,.0f} s ago; {held}",
            "no execution is cut before it is archived",
        )
