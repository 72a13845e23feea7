"""Every Redis key of Usher, in one place: name, type, lifetime, writer.

All keys of one ticket stream share one hash tag, so that they lie in one cluster slot and a script may touch them
together. ``{S}:G:`` is the prefix, ``S`` the stream, ``G`` the group; a stream key with a tag of its own
(``tenant{7}``) keeps that tag.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from typing import Any

#: Reserved consumer names of the group. No incarnation can have one of them: incarnations contain a colon.
MASTER = b"master"
HALTED = b"halted"
#: Field of a message whose sender waits for its result: the key of its reply stream, and the number of the call.
REPLY_FIELD = b"usher_reply"


def _tagged(stream: str) -> str:
    """Return the stream's name with a hash tag: its own if it has a non-empty one, as Redis Cluster reads it, else the
    whole name in braces."""
    opened = stream.find("{")
    if opened >= 0 and stream.find("}", opened + 1) > opened + 1:
        return stream
    return "{" + stream + "}"


def uid_key(stream: str, uid: bytes) -> bytes:
    """String with PX: the id of the entry that was added under this uid. Written by send (common/sending/producer.py),
    for all groups of the stream."""
    return f"{_tagged(stream)}:uid:".encode() + uid


def waiting_key(stream: str, group: str, ticket: bytes) -> bytes:
    """List with PX: ids of a ticket's messages, in order, that producers with a ``ticket_limit`` have added. Written
    by send (common/sending/producer.py); those that are over leave it when there is no room."""
    return f"{_tagged(stream)}:waiting:{group}:".encode() + ticket


class _Key:
    """A key, named behind the ``prefix`` as its attribute unless ``name`` is given. ``said``: for docs."""

    def __init__(self, said: str, name: str = "") -> None:
        self.__doc__, self._name = said, name

    def __set_name__(self, kind: type, name: str) -> None:
        self._name, self._attribute = self._name or name, name

    def __get__(self, keys: Any, kind: type) -> str:
        vars(keys)[self._attribute] = made = f"{keys.prefix}{self._name}"  # found there from now on
        return made


@dataclass(frozen=True)
class LogKeys:
    """The keys of a stream as a log, whatever its groups: who streams which outbox into it, and how far its readers
    are.

    >>> LogKeys("ticket_stream").checkpoints
    '{ticket_stream}:checkpoints'
    """

    stream: str
    outbox: str = "outbox"

    @property
    def prefix(self) -> str:
        return _tagged(self.stream) + ":"

    @property
    def leader(self) -> str:
        """String with PX: ``epoch holder`` of the streamer that leads for this outbox. Written by elect, extended by
        its holder."""
        return f"{self.prefix}streamer-{self.outbox}"

    counters = _Key("""Hash, never deleted: the last epoch of the streamers. Written by elect.""", "streamers")
    checkpoints = _Key("""Hash: name of a log consumer -> ``version id ms``, never ahead of its SQL. Written by
        note_checkpoint; trim keeps from ``id`` on.""")
    groups = _Key("""Hash: group -> the lowest id that the group would read again if it were lost now. Written by
        save_position (leader), by gather (of a source) and by plain readers (common/readers/loop.py); it
        stays when the group is lost, so that trim keeps from there on.""")
    archived = _Key("""String: the id up to which the stream is archived, itself included. Written by the archive; trim
        --archived-only keeps from it on.""")
    delayed = _Key("""Stream: messages to be added to the stream when they are due (field ``due_ms``). Written by
        producers, and by redrive; send_delayed and due_delayed (into a dead letter) remove entries, and so does
        move_delayed, for operators.""")
    due = _Key("""Sorted set: delayed message, its id padded to 2 x 20 digits -> ms at which it is due. Written by
        due_delayed, send_delayed and an operator's move_delayed, whose times are lost with this key: those of the
        messages count then.""")
    behind = _Key("""Hash with PX, only while producers are to wait: ``<group>``, or ``<group>/<tenant>`` -> how many
        messages wait. Written by its leader; producers look at it.""")

    def replies(self, caller: str) -> str:
        """Stream with PX, capped: answers to one caller (common/sending/producer.py), of all groups of the stream.
        Written by ack, and with dead letters; trimmed by the caller."""
        return f"{self.prefix}replies:{caller}"

    def followed(self, uid: bytes) -> bytes:
        """Return the address for answers to whoever knows the uid: a reply stream of its own."""
        return f"{self.replies(hashlib.sha256(uid).hexdigest()[:32])} 0".encode()

    due_until = _Key("""String: the id up to which ``delayed`` is in ``due``. Written by due_delayed.""")


@dataclass(frozen=True)
class Keys:
    """The keys of one ticket stream under one group.

    >>> Keys("ticket_stream", "g").tickets
    '{ticket_stream}:g:tickets'
    """

    stream: str
    group: str

    @functools.cached_property
    def prefix(self) -> str:
        return f"{_tagged(self.stream)}:{self.group}:"

    tickets = _Key("""Hash: ticket_id -> ``owner fence id id ...`` (lua/includes/records.lua). For ever; a field lives
        while its ticket has unfinished entries.""")
    consumers = _Key("""Hash: consumer name -> registration (see common/protocol/registration.py). Written by register
        and deregister.""")
    leader = _Key("""String with PX: ``epoch url`` of the master that leads. Written by elect, extended by its
        holder.""")
    epoch = _Key("""String: the epoch of the leader that has begun last. Written by begin; turns of a leader watch it,
        and the lease is apart from it, because a key that is watched must not change with each renewal.""")
    taken = _Key("""String: ``id entries-read``: all up to this id is pending, over, or a letter. What the group was
        given above it is in nobody's list yet: the leader has it in memory. Written by turns of the leader and
        begin.""")
    watched = _Key("""String, deleted at once: what the doctor changes to see whether WATCH is kept (common/doctor).""")
    counters = _Key("""Hash, never deleted: the last epoch, fence and generation, the version of the rules, and the
        longest lease of any consumer, in ms, with the first generation for which that is known. Written by elect, turns
        of the leader, next_generation, change_rules, register.""")
    attempts = _Key("""Hash: stream id -> attempts (see common/protocol/attempts.py) of a message that failed or ran in
        a crash. A field is deleted when its entry is done. Written by charge (owner), note_crash (the owner's
        successor) and take_back (leader).""")
    errors = _Key(
        """Hash: stream id -> last error, ``t`` with the id -> the end of its traceback
        (common/protocol/last_error.py), and ``h`` with the id -> its executions (common/protocol/run_log.py), of a
        message that failed, or that halted its ticket. Bounded by charge. Written by charge and dead_letter (owner),
        and note_crash; deleted with the attempts.""",
        "noted:errors",
    )
    failures = _Key(
        """Hash: ``failed`` -> executions that failed since it began. Written by charge (owner) and
        note_crash.""",
        "noted:failed",
    )
    position = _Key("""Hash: the group's saved position, and after a group loss the id up to which it repeats. Written
        by the leader.""")
    dead = _Key("""Stream: dead letters (lua/includes/letter.lua). Written by dead_letter (owner), reject (leader);
        redrive and drop remove entries.""")
    letters = _Key("""Sorted set: the index of the dead letters by ticket, message and error (lua/includes/index.lua).
        Written by each step that writes or removes one, and by recount_letters (leader), which mends it.""")
    recounted = _Key("Sorted set: that index as recount_letters (leader) makes it anew.", "letters:new")
    changed = _Key("""Stream, capped: tickets whose record another process than the leader changed, changes of the
        rules, consumers that come and go. It wakes the leader, and standbys when it resigns. Written by dead_letter,
        redrive, change_rules, register, renew, drain, deregister, elect.""")
    reports = _Key("""Stream, capped: reports to a leader in another process, of consumers that have no master's URL
        (`usher run`). Written by these, read by the leader.""")
    rules = _Key("""Hash: id of a live rule -> ``version ms json`` (master/policy/rules.py). For ever. Written by
        change_rules, read by the leader.""")
    actions = _Key("""Stream, capped: the action log of the operators (master/operations/action_log.py). Written by
        change_rules, and by every redrive or drop of letters.""")
    losses = _Key("""Stream, capped: declared losses (common/protocol/mishaps.py). Written by the leader, and by who
        gathers.""")
    runs = _Key("""Stream, capped: the run log, one entry per batch. Written by ack, charge and note_crash.""")
    charts = _Key("""Hash, of at most 1,450 fields of 4 KiB: place of a minute -> a point of the charts
        (master/insight/charts.py). Written by the leader, once a minute.""")
    audit = _Key("""String: the last audit's verdict and sums, one JSON object. Written by the audit, for pages and
        metrics.""")
    archived = _Key("""Hash: ``entries`` and ``runs`` -> the last id in the archive; ``proven_until_ms``, and
        ``proven_every_ms`` between the last two proofs, ``proven_took_ms`` of the last one; ``history``: what the last
        one said, as JSON. Written by the archive, for metrics, pages and the doctor.""")
    shares = _Key("""Hash, where several streams are gathered: master -> the time until which it counts as running, and
        what it says of itself (JSON). See common/doctor/collector.py: running_masters.""")
    gathered = _Key("""Hash, where several streams are gathered: source -> the last id that was moved to the work
        stream; a field is deleted when its stream is gone. Written by gather.""")

    def lease(self, incarnation: str) -> str:
        """String with PX: ``live``, ``draining`` or ``revoked``. Written by register, extended by renew."""
        return f"{self.prefix}lease:{incarnation}"

    def unproven(self, incarnation: str) -> str:
        """String with PX, beside a new lease: its holder has not shown yet that it reaches Redis. Written by register,
        deleted by the first renew; it lasts as long as a lease that nobody renews."""
        return self.lease(incarnation) + ":unproven"

    def noted(self, incarnation: str) -> str:
        """Hash with PX: notes on a dead incarnation while it is being recovered. The field "" says that its journal was
        read; each other field is a ticket whose first message counts as lost. Written by note_crash and take_back;
        deleted with the last page, or by deregister."""
        return f"{self.prefix}noted:{incarnation}"

    def signed_out(self, session: str) -> str:
        """String with PX: a session of the page whose user has signed out; kept as long as its cookie is good. Written
        by any master (common/http/auth.py)."""
        return f"{self.prefix}signed-out:{session}"

    def inbox(self, incarnation: str) -> str:
        """Stream: hand-overs to this incarnation, one record per turn of the leader (master/leader/leader_scripts.py),
        and orders. Trimmed by its reader; deleted with its incarnation: by deregister, with the last page of take_back,
        or when a successor registers."""
        return f"{self.prefix}inbox:{incarnation}"
