"""Define the checks of the audit and the words of their findings. Pure: definitions and small judgements, no Redis, no
Spark.

Each ``AuditCheck`` is executed twice, by different code: in Spark at scale (``pending_proof``, ``run_proof``) and by
``oracle`` in one plain process. A test holds the two against each other.
"""

from __future__ import annotations

import enum
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field

from usher.common.protocol.keys import HALTED, MASTER, Keys

#: Names of the group that are no incarnations, and that no lease is asked of.
RESERVED = frozenset({MASTER.decode(), HALTED.decode()})
#: Outcomes after which a message is over; the others are followed by another attempt.
DONE, CRASHED, GAVE_UP = "done", "crashed", "gave_up"
ENDED = (DONE, GAVE_UP)
HALTED_NAME, MASTER_NAME = HALTED.decode(), MASTER.decode()
#: A word of a hint that something is filled into, without the punctuation around it.
_FILLED = re.compile(r"(?:[\w:]*\{\w+\}\w*)+")
#: Executions of a full record of the run log.
RECORD_RUNS = 100
#: A fence is at least the milliseconds of Redis' clock when it was given, times this (common/lua/includes).
FENCES_PER_MS = 1024


class AuditSeverity(enum.Enum):
    """A finding's severity. BAD: the promise was broken, or work stands still. WARN: allowed once, but an operator
    should look. Both make the exit code 1."""

    BAD = "bad"
    WARN = "warn"


@dataclass(frozen=True)
class AuditCheck:
    """A named check. ``look`` and ``repair`` are lines with {stream} {group} {id} {ticket} {owner} {prefix} {dead}
    {runs} in them."""

    name: str
    severity: AuditSeverity
    rule: str
    means: str
    look: tuple[str, ...]
    repair: str


@dataclass(frozen=True)
class Example:
    """A place where a rule does not hold. Empty texts are unknown or do not apply. ``other_id``: the entry that it is
    compared with, and ``fence`` the fencing token."""

    stream: str
    id: str = ""
    ticket: str = ""
    owner: str = ""
    detail: str = ""
    other_id: str = ""
    fence: int = 0


@dataclass(frozen=True)
class AuditFinding:
    """A check that found something. ``count`` places were confirmed by a second look, of ``suspects`` that the first
    one saw."""

    check: AuditCheck
    stream: str
    count: int
    suspects: int
    examples: tuple[Example, ...] = field(default=())


_PENDING = "redis-cli XPENDING {stream} {group} {id} {id} 1"
_RECORD = "redis-cli HGET {prefix}tickets {ticket}"
_BODY = "redis-cli XRANGE {stream} {id} {id}"
_TICKET = "usher tickets show {ticket}"
_MEMBERS = "redis-cli XINFO CONSUMERS {stream} {group}"
_INBOX = "redis-cli XRANGE {prefix}inbox:{owner} - + COUNT 10"
_LEASE = "redis-cli PTTL {prefix}lease:{owner}"
_RUNS = "usher audit --streams {stream} --group {group} runs --ticket {ticket}"
_RUNS_OF_IT = "usher audit --streams {stream} --group {group} runs --message {id}"
_LEADER = (
    "The leader mends this by itself within seconds when one is alive (`usher status`); if it stays, restart the"
    " leader: it takes over anew."
)

CHECKS: dict[str, AuditCheck] = {
    check.name: check
    for check in (
        AuditCheck(
            "pending_without_index",
            AuditSeverity.BAD,
            "An entry that an incarnation has pending is in its ticket's record (tickets index).",
            "The entry has an owner, but the master does not know that its ticket is in processing: a later entry"
            " could overtake it.",
            (_PENDING, _RECORD),
            _LEADER,
        ),
        AuditCheck(
            "index_without_pending",
            AuditSeverity.BAD,
            "An id in a ticket's record is pending.",
            "The index holds a ticket for an entry that is over or was never delivered; later entries of the ticket may"
            " wait for it.",
            (_RECORD, _PENDING),
            _LEADER,
        ),
        AuditCheck(
            "owners_differ",
            AuditSeverity.BAD,
            "Pending list and index name the same owner.",
            "The pending list says one incarnation has the entry, the index another one.",
            (_PENDING, _RECORD),
            _LEADER,
        ),
        AuditCheck(
            "ticket_owned_twice",
            AuditSeverity.BAD,
            "All entries of a ticket that incarnations have pending belong to one of them.",
            "Two incarnations may run this ticket at once.",
            (_PENDING, _RECORD, _TICKET),
            "Stop one of the two consumers; its entries are taken back and handed over in order.",
        ),
        AuditCheck(
            "index_unreadable",
            AuditSeverity.BAD,
            "A record of the index reads `owner fence id id ...`.",
            "Another program wrote to the index; the ticket cannot be handed over or acknowledged.",
            (_RECORD,),
            "Delete the field (HDEL {prefix}tickets {ticket}): the pending list is the truth, the leader indexes it"
            " anew.",
        ),
        AuditCheck(
            "indexed_twice",
            AuditSeverity.BAD,
            "An entry is in the record of one ticket.",
            "Two tickets claim it: the other one's later entries wait for what is not theirs.",
            (_RECORD, _BODY, _PENDING),
            _LEADER,
        ),
        AuditCheck(
            "fence_future",
            AuditSeverity.BAD,
            "A fencing token is not given before its time.",
            "The record's fencing token lies in the future: sinks that have seen it refuse all that come after.",
            (_RECORD, "redis-cli TIME"),
            "Was Redis' clock set back, or the record written by hand? Take the next tokens from above it: restart the"
            " leader.",
        ),
        AuditCheck(
            "fence_low",
            AuditSeverity.BAD,
            "The fencing token of a ticket is not lower than one under which it has run.",
            "The record's fencing token is lower than one that sinks have seen: they refuse what its owner does now.",
            (_RECORD, _RUNS),
            "Was Redis restored from a copy, or the record written by hand? Restart the owner: the ticket is"
            " handed over under a new token.",
        ),
        AuditCheck(
            "index_unordered",
            AuditSeverity.BAD,
            "The ids in a record are in order, each once.",
            "Its owner runs them in the order of the record, which is not that of the stream.",
            (_RECORD, _PENDING),
            "Did another program write to the index? Delete the field (HDEL {prefix}tickets {ticket}): the leader"
            " indexes it anew.",
        ),
        AuditCheck(
            "never_told",
            AuditSeverity.BAD,
            "What an incarnation owns was handed over in its inbox, as far back as that goes.",
            "It owns the entry and was never told: it does not run it, and later entries of the ticket wait.",
            (_RECORD, _PENDING, _INBOX),
            "Restart that consumer: its tickets are handed over anew. Did another program write to index or inbox?",
        ),
        AuditCheck(
            "inbox_differs",
            AuditSeverity.BAD,
            "What an inbox hands over is in the record of its ticket, under that fencing token or a later one.",
            "The inbox names what its owner was not given: it runs a ticket that another one may have, or an"
            " entry that nobody was given.",
            (_INBOX, _RECORD, _PENDING),
            "Did another program write to the inbox? Restart that consumer.",
        ),
        AuditCheck(
            "owner_dead",
            AuditSeverity.BAD,
            "Every pending entry has a living owner, or is taken back from a dead one within the recovery bound.",
            "These entries are pending for an incarnation whose lease ended long ago; no consumer works on them.",
            (_LEASE, "redis-cli XPENDING {stream} {group} - + 10 {owner}"),
            "See that a master leads (`usher status`); it takes them back. No master: start one.",
        ),
        AuditCheck(
            "stranger_owns",
            AuditSeverity.BAD,
            "Names in the group are incarnations (`name:generation`), `master` or `halted`.",
            "Another program reads this group, or entries were claimed by hand: these entries are not handed over in"
            " order.",
            (_MEMBERS, "redis-cli XPENDING {stream} {group} - + 10 {owner}"),
            "Stop that program, or give it a group of its own; the leader's sweep brings idle entries back.",
        ),
        AuditCheck(
            "idle_too_long",
            AuditSeverity.BAD,
            "An entry of a living incarnation is never idle for longer than one lease: its renewal touches it.",
            "The lease is extended but this entry is not touched: the renewal cannot see it, or another program"
            " extends the lease.",
            (_PENDING, _LEASE),
            "Restart that consumer; its tickets go to others.",
        ),
        AuditCheck(
            "parked_too_long",
            AuditSeverity.WARN,
            "An entry waits under `master` only while its ticket is in processing, a live rule holds it back, or no"
            " consumer has room.",
            "The entry waits, nothing of its ticket is in processing, and no rule holds it back: no consumer has room,"
            " or it was forgotten.",
            (_PENDING, _BODY, "usher status"),
            "Start consumers. If there are some with room, restart the leader: it reads all that is pending under"
            " `master`.",
        ),
        AuditCheck(
            "body_gone",
            AuditSeverity.BAD,
            "A pending entry is in the stream.",
            "The entry was trimmed or deleted before it was handled: its content is lost. XADD MAXLEN by a producer"
            " does that too.",
            (_PENDING, _BODY),
            "Trim with `usher trim` only, which never cuts what is pending. The leader writes a dead letter of it"
            " (reason body_gone).",
        ),
        AuditCheck(
            "delivered_often",
            AuditSeverity.WARN,
            "An entry is delivered a few times at most.",
            "It has changed hands again and again: its handler may kill its consumers.",
            (_PENDING, _BODY, "redis-cli HGET {prefix}attempts {id}"),
            "Look at the message; `usher dead` lists those that were given up.",
        ),
        AuditCheck(
            "attempts_many",
            AuditSeverity.WARN,
            "A message becomes a dead letter after USHER_MAX_ATTEMPTS starts that ended badly.",
            "More of them were counted than the limit allows, or it is about to be given up.",
            ("redis-cli HGET {prefix}attempts {id}", _BODY),
            "Look at the message and its handler's log.",
        ),
        AuditCheck(
            "attempts_leaked",
            AuditSeverity.WARN,
            "Attempts are kept for pending entries only.",
            "Attempts of an entry that is over: memory that is never freed.",
            ("redis-cli HGET {prefix}attempts {id}", _PENDING),
            "Delete the field: HDEL {prefix}attempts {id}.",
        ),
        AuditCheck(
            "attempts_wrong",
            AuditSeverity.WARN,
            "Starts of a message are counted one by one.",
            "The run log has a start too many or one too few: a start was not noted, or ran under a number that"
            " another one had.",
            (_RUNS_OF_IT, "redis-cli HGET {prefix}attempts {id}"),
            "Did another program change the attempts or the run log? Then this is its trace. If not, please report it.",
        ),
        AuditCheck(
            "failed_often",
            AuditSeverity.WARN,
            "A message that has failed USHER_MAX_ATTEMPTS times becomes a dead letter.",
            "It failed more often, and started again.",
            (_RUNS_OF_IT, _BODY),
            "Has its handler max_attempts of its own? Then this is well; else have all consumers the same"
            " USHER_MAX_ATTEMPTS?",
        ),
        AuditCheck(
            "consumer_leaked",
            AuditSeverity.WARN,
            "The leader reaps incarnations whose lease ended and that have nothing pending.",
            "A name of the group is left over: harmless, but each start of a consumer adds one.",
            (_MEMBERS, _LEASE),
            "See that a master leads (`usher status`): its janitor reaps. Never XGROUP DELCONSUMER by hand: it deletes"
            " what is pending.",
        ),
        AuditCheck(
            "key_leaked",
            AuditSeverity.WARN,
            "An inbox lives as long as its incarnation.",
            "An inbox without an owner: memory that is never freed.",
            ("redis-cli XLEN {prefix}inbox:{owner}", _LEASE),
            "Delete it: DEL {prefix}inbox:{owner}.",
        ),
        AuditCheck(
            "key_foreign",
            AuditSeverity.BAD,
            "Keys of Usher have the type and the form that Usher gives them.",
            "Another program wrote to it: masters and consumers cannot work with it. The stream was not audited.",
            ("redis-cli --scan --pattern '{prefix}*'",),
            "Find the program that writes there, and restore the key from a copy, or delete it (deploy/runbook.md).",
        ),
        AuditCheck(
            "lease_orphan",
            AuditSeverity.WARN,
            "A lease belongs to a consumer that is registered, or has entries pending.",
            "A lease of nobody: the leader waits for its end.",
            (_LEASE,),
            "Did another program make the key? It ends by itself, or: DEL {prefix}lease:{owner}.",
        ),
        AuditCheck(
            "unregistered",
            AuditSeverity.WARN,
            "A living incarnation is registered.",
            "It has a lease and never registered, so the leader gives it nothing and does not count it.",
            (_MEMBERS, "redis-cli HGETALL {prefix}consumers"),
            "Restart that consumer. Is another program reading this group?",
        ),
        AuditCheck(
            "overlap",
            AuditSeverity.BAD,
            "Under one fencing token, and in one incarnation, executions of a ticket follow one another.",
            "Two messages of a ticket ran at the same time in one incarnation.",
            (_RUNS,),
            "This is a fault of Usher, or the consumer's clock was set back: please report it with the two lines.",
        ),
        AuditCheck(
            "owners_overlap",
            AuditSeverity.WARN,
            "Executions of a ticket under different fencing tokens that are both recorded follow one another, unless a"
            " process was paused.",
            "A former owner still ran while its successor did: at most one of them has an effect if the sink checks"
            " fencing tokens.",
            (_RUNS,),
            "Look for pauses (suspend, swap, long collections) of the earlier owner, and for clocks that differ. Use a"
            " fenced sink.",
        ),
        AuditCheck(
            "out_of_order",
            AuditSeverity.BAD,
            "A message of a ticket starts only when every earlier one is done or given up.",
            "A later message of the ticket had started before this one was ever done.",
            (_RUNS, _BODY),
            "Effects of this ticket may be wrong: compare them, then please report it.",
        ),
        AuditCheck(
            "overtaken",
            AuditSeverity.BAD,
            "While a message of a ticket is pending, no later one of the ticket is done.",
            "A later message of the ticket was done before this one, which is still to come: when it runs, it is out of"
            " order.",
            (_PENDING, _RUNS),
            "Was the group set forward over it by hand, and back (XGROUP SETID)? Then this is its trace. If not, please"
            " report it.",
        ),
        AuditCheck(
            "fence_shared",
            AuditSeverity.BAD,
            "A fencing token of a ticket is given to one incarnation.",
            "Two incarnations ran the ticket under one fencing token: a sink cannot tell them apart.",
            (_RUNS,),
            "Was Redis restored from a copy? Then this is its trace. If not, please report it.",
        ),
        AuditCheck(
            "fence_fell",
            AuditSeverity.BAD,
            "No message of a ticket starts under a lower fencing token after one has started under a higher one.",
            "A former owner started a message after its successor had: it was paused at the worst moment, or clocks"
            " differ by more than that.",
            (_RUNS,),
            "A fenced sink has refused its effect. Look for pauses of that process; set the clocks (NTP).",
        ),
        AuditCheck(
            "lost",
            AuditSeverity.BAD,
            "Every entry that the group has read is pending, acknowledged by an execution in the run log, or a dead"
            " letter.",
            "The entry was read, is not pending, and no record says that it was handled: acknowledged by hand, or its"
            " consumer deleted.",
            (_BODY, _PENDING, "redis-cli XRANGE {runs} - + COUNT 10"),
            "Send it again if its effect is missing: usher send. Look for XACK or XGROUP DELCONSUMER by other programs"
            " (redis-cli MONITOR).",
        ),
        AuditCheck(
            "cut_unread",
            AuditSeverity.BAD,
            "No entry leaves the stream before the group has read it (counted by Redis 7 or later).",
            "Messages were sent and cut before anybody read them: MAXLEN or MINID of an XADD, XTRIM or XDEL. They were"
            " never handled, and no letter tells of them.",
            ("redis-cli XINFO STREAM {stream}", "redis-cli XINFO GROUPS {stream}"),
            "Have them sent again; take the option out of the producer, and trim with `usher trim` only.",
        ),
        AuditCheck(
            "effect_twice",
            AuditSeverity.BAD,
            "A message that is recorded as done is not done again; only a former owner may record another success,"
            " behind its successor's.",
            "It succeeded, Redis knew, and it succeeded again: its effect is there twice, unless its sink knows uids.",
            (_RUNS_OF_IT, _BODY),
            "No master declared it (`usher doctor` tells declared losses). Was the group set back by hand, or Redis'"
            " data copied back? Then this is its trace. If not, please report it.",
        ),
        AuditCheck(
            "repeat_declared",
            AuditSeverity.WARN,
            "A message that is recorded as done comes again only after a master has declared that it may.",
            "It succeeded, and again after the group was lost or set back, as a master declared then (group_lost,"
            " group_set_back): its effect is there twice, unless its sink knows uids.",
            (_RUNS_OF_IT, _BODY),
            "Look whether its effects must be undone; a sink that knows uids has refused them.",
        ),
        AuditCheck(
            "stale_counted",
            AuditSeverity.BAD,
            "A success counts under the fencing token under which the ticket was handed over last; a former owner's"
            " acknowledgement is refused.",
            "A former owner's acknowledgement counted when another owner had its ticket: the message is over, and its"
            " effect may be there twice.",
            (_RUNS, _RUNS_OF_IT, _BODY),
            "Did Redis fail over, or was it restored from a copy? Then this may be its trace. If not, please"
            " report it.",
        ),
        AuditCheck(
            "effect_missing",
            AuditSeverity.BAD,
            "A message that is done has its effect in the sink (checked where USHER_AUDIT_SINK_URL names its"
            " database).",
            "The handler returned, and the sink knows nothing of the message: its effect is not there, or it was stored"
            " without the sink.",
            (_RUNS_OF_IT, _BODY),
            "Does every handler of this stream use the sink? Was the database restored from a copy? Then send the"
            " message again: usher send.",
        ),
        AuditCheck(
            "dead_and_done",
            AuditSeverity.BAD,
            "A message is done, or it is a dead letter; never both.",
            "It has an effect and lies among the dead letters: a redrive would repeat it.",
            (_RUNS_OF_IT, "redis-cli XREVRANGE {dead} + - COUNT 10"),
            "Discard the letter instead of redriving it.",
        ),
        AuditCheck(
            "dead_and_pending",
            AuditSeverity.WARN,
            "A dead letter's message is over, or held under `halted` until the letter is dealt with.",
            "The message is pending again beside its letter: it will run, and a redrive would run it once more.",
            (_PENDING, _RUNS_OF_IT, "redis-cli XREVRANGE {dead} + - COUNT 10"),
            "Was the group set back (XGROUP SETID)? Discard the letter when the message is done.",
        ),
        AuditCheck(
            "letters_twice",
            AuditSeverity.WARN,
            "A message has one dead letter at most.",
            "It lies among the dead letters more than once: redriving them all would run it as often.",
            (_RUNS_OF_IT, "redis-cli XREVRANGE {dead} + - COUNT 10"),
            "Was the group set back (XGROUP SETID)? Discard all of its letters but one.",
        ),
        AuditCheck(
            "letter_missing",
            AuditSeverity.BAD,
            "A message that was given up has a dead letter, or was sent again, or its letter was dropped.",
            "It was given up, was never done, and nothing is left of it to be redriven.",
            (_RUNS_OF_IT, _BODY),
            "Send it again if its effect is missing: usher send. Look for XDEL or DEL of dead letters by others.",
        ),
        AuditCheck(
            "ticket_differs",
            AuditSeverity.BAD,
            "A message runs under the ticket that is in its entry.",
            "It ran under another ticket: beside messages that it should have come before or after.",
            (_RUNS_OF_IT, _BODY),
            "Do all masters and consumers have the same USHER_TICKET_FIELD? Did another program write to the run log?",
        ),
        AuditCheck(
            "unread_and_run",
            AuditSeverity.BAD,
            "A message runs after the group has read it.",
            "The group has not read it, and it ran: it will be read, and run again; or it never was in the stream.",
            (_RUNS_OF_IT, _BODY, "redis-cli XINFO GROUPS {stream}"),
            "Was the group set back (XGROUP SETID), or Redis restored from a copy? Then this is its trace.",
        ),
        AuditCheck(
            "times_impossible",
            AuditSeverity.WARN,
            "An execution ends after it starts, and of one owner's executions the first recorded has not begun last.",
            "The consumer's clock was set back while the handler ran, or between two messages: proofs by time are"
            " weaker around that moment.",
            (_RUNS_OF_IT,),
            "Let NTP slew the clock, not step it.",
        ),
        AuditCheck(
            "clock_wrong",
            AuditSeverity.WARN,
            "A consumer's clock is that of Redis, within half of USHER_AUDIT_CLOCK_SECONDS.",
            "Fencing tokens and the times of its records say how far it is off. Executions are compared with that taken"
            " out; handlers that ask for the time get a wrong one.",
            ("redis-cli TIME",),
            "Set the clock of that host, or of Redis' (NTP).",
        ),
        AuditCheck(
            "run_unreadable",
            AuditSeverity.BAD,
            "A record of the run log is one object of columns (common/protocol/run_log.py).",
            "Another program wrote to the run log: what it replaced cannot be proven.",
            ("redis-cli XRANGE {runs} {id} {id}",),
            "Find the program that writes to {runs}; XDEL the record.",
        ),
    )
}


@dataclass(frozen=True)
class AuditThresholds:
    """The limits beyond which something is a finding. Times in milliseconds.

    ``owner_idle_ms``: an entry of an incarnation, living or dead; ``parked_ms``: an entry under ``master`` with nothing
    of its ticket in processing; ``reaped_ms``: a dead incarnation with nothing pending, in the group; ``clocks_ms``:
    how far clocks of two consumers may differ.
    """

    owner_idle_ms: int = 30_000
    parked_ms: int = 300_000
    deliveries: int = 20
    attempts: int = 5
    clocks_ms: int = 1000
    reaped_ms: int = 30_000


def commands(check: AuditCheck, example: Example, keys: Keys) -> list[str]:
    """Return the command lines to look closer, with everything filled in and quoted for a shell; lines that need an
    unknown value are left out."""
    known = {"id": example.id, "ticket": example.ticket, "owner": example.owner}
    names = {"stream": keys.stream, "group": keys.group, "prefix": keys.prefix, "dead": keys.dead, "runs": keys.runs}
    lines = []
    for line in check.look:
        words = []
        for word in line.split(" "):
            if any("{" + name + "}" in word and not value for name, value in known.items()):
                break
            filled = word.format(**names, **known) if "{" in word else word
            words.append(shlex.quote(filled) if "{" in word else filled)
        else:
            lines.append(" ".join(words))
    return lines


def repair(check: AuditCheck, example: Example, keys: Keys) -> str:
    """Return the hint with everything filled in; parts for a command line are quoted for a shell."""
    known = {
        "prefix": keys.prefix,
        "runs": keys.runs,
        "id": example.id,
        "ticket": example.ticket,
        "owner": example.owner,
    }
    return _FILLED.sub(lambda found: shlex.quote(found[0].format(**known)), check.repair)


def in_order(found: Sequence[AuditFinding]) -> list[AuditFinding]:
    """Return the findings, the worst first, as a reader wants them."""
    names = list(CHECKS)
    return sorted(
        found, key=lambda one: (one.check.severity is not AuditSeverity.BAD, names.index(one.check.name), one.stream)
    )
