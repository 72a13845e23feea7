"""Write the rights of each program in Redis as users of an ACL file: ``usher acl`` prints it; ``deploy/users.acl`` is
the file for the default names.

A program runs scripts, and the user that runs a script needs the rights of every command in it. So a user's commands
are those of its scripts, read out of their text, and those that it sends itself. Keys are patterns of names, as Redis
6.2 knows them: a user's commands are allowed on all of its keys. These users confine the reach of a program that is
faulty or was broken into; they do not prove ownership. A user with the right to acknowledge may acknowledge any entry
of the stream, and an auditor could write where it reads.
"""

from __future__ import annotations

import fnmatch
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from usher.common.base.errors import StartRefused
from usher.common.protocol.keys import Keys, LogKeys, uid_key
from usher.common.protocol.sources import is_pattern
from usher.common.redis.scripts import source

_CALL = re.compile(r"redis\.p?call\('(\w+)'(?:,\s*'(GROUPS|STREAM|CONSUMERS|DELCONSUMER|CREATE|SETID)')?")
_TABLE = re.compile(r"command = \{'(\w+)'")
_ENDS_WORD = re.compile(r"[\s\x00-\x1f\x7f\"']")
#: Commands of every connection, of a start, and of the doctor (MULTI and DISCARD: see common/doctor/rights.py).
_CONNECT = ("client|setname", "select", "ping", "info", "cluster|slots", "acl|whoami", "multi", "discard")
_SCRIPTS = ("evalsha", "eval")
_WITH_SUBCOMMANDS = ("XINFO", "XGROUP", "CLIENT", "ACL", "CLUSTER")


@dataclass(frozen=True)
class AclProgram:
    """A kind of program. ``sends``: the commands that it sends itself, beside its scripts. ``keys``: patterns."""

    name: str
    about: str
    scripts: tuple[str, ...]
    sends: tuple[str, ...]
    keys: tuple[str, ...]
    connects: bool = True

    @property
    def commands(self) -> tuple[str, ...]:
        """All commands of the program, as an ACL names them."""
        own = (*(_CONNECT if self.connects else ()), *(_SCRIPTS if self.scripts else ()))
        return tuple(sorted({*own, *self.sends, *(command for name in self.scripts for command in commands_of(name))}))

    def line(self, password: str = "") -> str:
        """Return its line in the file; without a password it cannot log in."""
        keys = " ".join(f"~{key}" for key in self.keys)
        return (
            f"user {self.name} {_entry(password)} resetkeys resetchannels -@all {keys}"
            f" {' '.join(f'+{command}' for command in self.commands)}"
        )

    def uses(self, command: Sequence[object]) -> bool:
        """Return True if the program may send ``command`` on the keys in it."""
        words = [word.decode() if isinstance(word, bytes) else str(word) for word in command]
        name = "|".join(words[:2] if words[0] in _WITH_SUBCOMMANDS else words[:1]).lower()
        stream = self.keys[0].replace("\\", "")
        ours = [
            word
            for word in words[1:]
            if word == stream or word.startswith(f"{{{stream}}}:") or (stream in word and word.startswith(stream + ":"))
        ]
        return name in self.commands and all(any(_fits(word, key) for key in self.keys) for word in ours)


def commands_of(script: str) -> set[str]:
    """Return the commands of a script and its includes, as an ACL names them: ``xadd``, ``xinfo|groups``."""
    text = re.sub(r"--.*", "", source(script))
    found = {"|".join(filter(None, words)).lower() for words in _CALL.findall(text)}
    return found | {name.lower() for name in _TABLE.findall(text)}


def programs(stream: str, group: str, sources: Sequence[str] = ()) -> tuple[AclProgram, ...]:
    """Return all kinds of programs around one ticket stream and group.

    ``sources``: names and patterns of the streams gathered into it, if it is a work stream.
    """
    keys, log = Keys(_escape_pattern(stream), _escape_pattern(group)), LogKeys(_escape_pattern(stream), "*")
    everything, at = f"{keys.prefix}*", keys.stream
    fed = tuple(source if is_pattern(source) else _escape_pattern(source) for source in sources)
    work = (at, keys.tickets, keys.attempts, keys.runs, keys.dead, keys.changed, keys.consumers)
    return (
        *_senders(fed or (at,), log),
        AclProgram(
            "consumer",
            "consumers",
            _CONSUMER,
            ("xread", "xreadgroup", "xtrim", "xrange", "hmget", "exists", "hgetall"),
            (*work, keys.rules, keys.lease("*"), keys.inbox("*"), keys.noted("*")),
        ),
        AclProgram(
            "master",
            "masters, and the commands of operators",
            _MASTER + _GATHERING * bool(fed),
            _MASTER_SENDS + ("scan",) * bool(fed),
            (
                at,
                everything,
                log.checkpoints,
                log.archived,
                log.groups,
                log.delayed,
                log.due,
                log.due_until,
                uid_key(at, b"*").decode(),
                *fed,
                *(key for source in fed for key in _beside(LogKeys(source))),
            ),
        ),
        AclProgram(
            "streamer",
            "streamers of an outbox; with USHER_OUTBOX_WAIT_AOF it needs +waitaof too (Redis 7.2)",
            ("emit", "elect", "hold_lead", "resign"),
            ("wait", "xinfo|stream", "get", "pttl"),
            (at, log.leader, log.counters),
        ),
        AclProgram("reader", "log consumers (LogConsumer)", ("note_checkpoint",), _READER_SENDS, (at, log.checkpoints)),
        AclProgram(
            "auditor",
            "`usher audit`, `usher audit archive`, `usher rehearse`",
            _AUDITOR,
            _AUDITOR_SENDS,
            (at, everything, log.archived),
        ),
    )


def _senders(given: Sequence[str], log: LogKeys) -> tuple[AclProgram, ...]:
    """Return the programs that add messages to the streams ``given``."""
    return (
        AclProgram(
            "producer",
            "programs that add messages with a plain XADD (no MAXLEN: that cuts what is not read yet)",
            (),
            ("xadd",),
            (*given, log.delayed),
            connects=False,
        ),
        AclProgram(
            "sender",
            "`usher send`, Producer",
            ("send",),
            ("xadd", "xinfo|stream", "time"),
            (*given, log.delayed, *(uid_key(one, b"*").decode() for one in given)),
        ),
    )


def _beside(source: LogKeys) -> tuple[str, ...]:
    """Return the keys of a source's other readers that masters read or write."""
    return (source.groups, source.checkpoints, source.archived)


_CONSUMER = ("renew", "ack", "dead_letter", "charge", "drain", "give_back", "deregister", "note_crash")
_MASTER = (
    "peek",
    "read_parked",
    "reject",
    "end_tail",
    "hand_over",
    "recall",
    "take_back",
    "free_tickets",
    "restore",
    "sweep",
    "save_position",
    "note_repeats",
    "rejoin",
    "revoke",
    "reap",
    "forget_attempts",
    "elect",
    "hold_lead",
    "resign",
    "next_generation",
    "register",
    "redrive",
    "drop_letters",
    "read_letters",
    "count_above",
    "count_between",
    "trim",
    "change_rules",
    "order",
    "end_by_rule",
    "ticket_entries",
    "find_entries",
    "find_runs",
    "pending_heads",
    "send",
    "read_field",
    "due_delayed",
    "send_delayed",
)
_AUDITOR = ("count_above", "count_between", "find_entries", "find_runs", "look_again", "read_letters")
_GATHERING = ("gather", "share", "look_at_sources")
_MASTER_SENDS = (
    "xread",
    "xrange",
    "xrevrange",
    "xlen",
    "xpending",
    "xinfo|stream",
    "xinfo|groups",
    "xinfo|consumers",
    "xgroup|create",
    "client|tracking",
    "get",
    "mget",
    "pttl",
    "exists",
    "hget",
    "hgetall",
    "hmget",
    "hscan",
    "hlen",
    "hdel",
    "pexpire",
    "xadd",
    "time",
    "zrange",
    "zcard",
    "zscore",
    "xdel",
    "zrem",
)
_READER_SENDS = ("xread", "xrange", "xrevrange", "xinfo|stream")
_AUDITOR_SENDS = (
    "xrange",
    "xrevrange",
    "xlen",
    "xpending",
    "xinfo|stream",
    "xinfo|groups",
    "xinfo|consumers",
    "time",
    "get",
    "pttl",
    "exists",
    "hget",
    "hgetall",
    "hmget",
    "hscan",
    "hlen",
    "hset",
    "set",
)
_HEAD = """\
# Users of Redis for Usher, with the rights that each kind of program needs and no more. Made by
# `usher acl --ticket-stream {stream} --group {group}`.
# Use: give each user that you need a password (`on >the-password` in place of `off resetpass`, or
# `on #sha256-of-it`), then `include` this file in redis.conf; or, for ACL LOAD,
# `grep ^user users.acl > /etc/redis/aclfile`: an aclfile may have no comments.
# Programs name their user in the URL: redis://consumer:the-password@host:6379/0.
# The user `default` has no rights; keep a user of your own for administration: `user admin on >... ~* &* +@all`.
# Rights are by kind of program, not by name: a consumer's user may touch the keys of other consumers of the same
# stream. And they hold for all keys of a user alike (Redis 6.2): a user that may trim an inbox may trim the stream.
# This confines mistakes and break-ins to this one system, no further: who may XADD may cut unread messages with it
# (MAXLEN, MINID), since rights do not tell options apart. Masters tell of that from Redis 7 on (`unread_entries_cut`).
"""


_NOBODY = "user default off resetpass resetkeys resetchannels -@all"
#: The user with all rights, in a file with passwords.
ADMIN = "admin"
#: The names of all users of a file with passwords.
USERS = ("producer", "sender", "consumer", "master", "streamer", "reader", "auditor", ADMIN)


def acl_file(stream: str, group: str, sources: Sequence[str] = (), passwords: Mapping[str, str] | None = None) -> str:
    """Return the whole file; see ``programs``. With ``passwords``, one for each of ``USERS``, it is a ready aclfile
    with only their hashes, and without comments, which Redis refuses there. Raises StartRefused for a stream name that
    would end its word in the file, or begin a line."""
    odd = [name for name in (stream, *sources) if _ENDS_WORD.search(name)]
    if odd:
        raise StartRefused(
            "a stream with a space, a line break or a quote in its name cannot stand in an ACL file:"
            f" {', '.join(map(repr, odd))}"
        )
    if passwords:
        lines = [_NOBODY, *(program.line(passwords[program.name]) for program in programs(stream, group, sources))]
        return "\n".join([*lines, f"user {ADMIN} {_entry(passwords[ADMIN])} ~* &* +@all"]) + "\n"
    lines = [_HEAD.format(stream=",".join(sources) or stream, group=group), _NOBODY]
    for program in programs(stream, group, sources):
        lines += ["", f"# {program.about}", program.line()]
    return "\n".join(lines) + "\n"


def _entry(password: str) -> str:
    """Return the words that set how the user logs in."""
    return f"on resetpass #{hashlib.sha256(password.encode()).hexdigest()}" if password else "off resetpass"


def _escape_pattern(name: str) -> str:
    """Escape the characters of a name that are special in Redis' patterns."""
    return re.sub(r"([*?\[\]\\^])", r"\\\1", name)


def _fits(key: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(key, re.sub(r"\\([*?\[\]])", r"[\1]", pattern))
