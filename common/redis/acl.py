"""Write the rights of each program in Redis as users of an ACL file: ``usher acl`` prints it; ``deploy/users.acl`` is
the file for the default names.

A program runs scripts, and the user that runs a script needs the rights of every command in it. So a master's commands
are those of its scripts, read out of their text, and those that it sends itself. All other users have a selector for
each kind of key, with the commands that its scripts run there, and may run scripts by their digest only (EVALSHA):
those that masters have loaded (``Link.load_for_others``). A script of somebody's own could hold up the whole
server.

Redis 6.2 knows no selectors: a user's commands are allowed on all of its keys, and EVAL stays allowed too, since a user
that may run EVALSHA on all of its commands gains nothing by being kept from the rest.

These users confine the reach of a program that is faulty or was broken into; they do not prove ownership. A user with
the right to acknowledge may acknowledge any entry of the stream.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from usher.common.base.errors import StartRefused
from usher.common.protocol.keys import Keys, LogKeys, uid_key, waiting_key
from usher.common.protocol.sources import is_pattern
from usher.common.redis.scripts import source

_CALL = re.compile(r"redis\.p?call\('(\w+)'(?:,\s*'(GROUPS|STREAM|CONSUMERS|DELCONSUMER|CREATE|SETID|USAGE)')?")
_TABLE = re.compile(r"(?:command = \{|each_entry\()'(\w+)'")
_ENDS_WORD = re.compile(r"[\s\x00-\x1f\x7f\"'()]")
#: Commands of every connection, of a start, and of the doctor (common/doctor/collector.py).
_CONNECT = ("client|setname", "select", "ping", "info", "cluster|slots", "acl|whoami", "acl|dryrun")


#: Commands, and the keys on which they are allowed.
Grant = tuple[tuple[str, ...], tuple[str, ...]]


@dataclass(frozen=True)
class AclProgram:
    """A kind of program. ``sends``: commands without keys that it sends or its scripts run. ``grants``: the others."""

    name: str
    about: str
    scripts: tuple[str, ...]
    sends: tuple[str, ...]
    grants: tuple[Grant, ...]
    connects: bool = True

    @property
    def commands(self) -> tuple[str, ...]:
        return tuple(sorted({*self._plain, *(command for commands, _ in self.grants for command in commands)}))

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(key for _, keys in self.grants for key in keys))

    @property
    def _plain(self) -> set[str]:
        return {*(_CONNECT if self.connects else ()), *self.sends}

    def line(self, password: str = "", *, selectors: bool = True) -> str:
        """Return its line in the file, for Redis 7 or later, or (without ``selectors``) for 6.2; without a password it
        cannot log in."""
        began = f"user {self.name} {_entry(password)} resetkeys resetchannels -@all"
        if not selectors or len(self.grants) == 1:
            commands = {*self.commands, *(("eval",) if "evalsha" in self.commands else ())}
            return " ".join([began, *(f"~{key}" for key in self.keys), *(f"+{one}" for one in sorted(commands))])
        granted = [
            f"({' '.join([*(f'~{key}' for key in keys), *(f'+{one}' for one in sorted(set(commands)))])})"
            for commands, keys in self.grants
        ]
        return " ".join([began, *(f"+{one}" for one in sorted(self._plain)), *granted])


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
    fed = tuple(source if is_pattern(source) else _escape_pattern(source) for source in sources)
    given = fed or (keys.stream,)
    replies = tuple(LogKeys(one).replies("*") for one in given)
    kinds: dict[str, tuple[str, ...]] = {name: (getattr(keys, name),) for name in _OF_GROUP}
    kinds |= {name: (getattr(log, name),) for name in _OF_LOG}
    kinds |= {name: (getattr(keys, name)("*"),) for name in ("lease", "inbox", "noted")}
    kinds |= {"given": given, "replies": replies, "all": (f"{keys.prefix}*",), "log.archived": (log.archived,)}
    kinds["uids"] = tuple(uid_key(one, b"*").decode() for one in given)
    kinds["waiting"] = tuple(waiting_key(one, "*", b"").decode() for one in given)
    found = [
        AclProgram(name, about, _words(steps), _words(sends), _granted(name, kinds), connects=name != "producer")
        for name, about, steps, sends in _PROGRAMS
    ]
    notes, delayed = (log.checkpoints, log.archived, log.groups), (log.delayed, log.due, log.due_until, log.behind)
    its_keys = (keys.stream, *kinds["all"], *notes, *delayed, *replies, uid_key(keys.stream, b"*").decode())
    of_sources = (*fed, *(key for log in map(LogKeys, fed) for key in (log.groups, log.checkpoints, log.archived)))
    scripts = _MASTER + _GATHERING * bool(fed)
    sends = (*_MASTER_SENDS, *("scan",) * bool(fed), "evalsha", "eval", "script|exists", "script|load")
    of_scripts = (command for name in scripts for command in commands_of(name))
    grants = (((*sends, *of_scripts), (*its_keys, *of_sources)),)
    about = "masters, and the commands of operators"
    return (*found[:3], AclProgram("master", about, scripts, ("multi", "exec", "unwatch"), grants), *found[3:])


def _granted(name: str, kinds: Mapping[str, tuple[str, ...]]) -> tuple[Grant, ...]:
    rows = [row.removeprefix(name).split(": ") for row in _GRANTS.splitlines() if row.startswith(f"{name} ")]
    grants = [(_words(commands), tuple(key for kind in _words(of) for key in kinds[kind])) for commands, of in rows]
    everywhere = tuple(dict.fromkeys(key for _, keys in grants for key in keys))
    return (*grants, *((("evalsha",), everywhere),) * (name != "producer"))


def scripts_for_others() -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for one in programs("s", "g") if one.name != "master" for name in one.scripts))


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_STREAMER = "streamers of an outbox; with USHER_OUTBOX_WAIT_AOF it needs +waitaof too (Redis 7.2)"
_AUDITOR = "find_entries look_again read_fields read_letters"
#: Name, what it is, its scripts, and commands without keys.
_PROGRAMS = (
    ("producer", "programs that add messages with a plain XADD (no MAXLEN: it cuts unread messages)", "", ""),
    ("sender", "`usher send`, Producer", "send", "time"),
    ("consumer", "consumers", "renew ack dead_letter charge drain give_back deregister note_crash", "time multi exec"),
    ("streamer", _STREAMER, "emit elect", "time wait"),
    ("reader", "log consumers (LogConsumer)", "note_checkpoint", "time"),
    ("auditor", "`usher audit` and its commands, `usher rehearse`", _AUDITOR, "time"),
)
#: Who may send what to which kinds of keys: those of the group and the log by their names there.
_GRANTS = """
producer xadd: given delayed
sender xadd: given delayed
sender hgetall: behind
sender get set: uids
sender get: taken
sender xpending: given
sender llen lindex ltrim rpush pexpire: waiting
sender xread xdel: replies
consumer xreadgroup xread xrange xack xclaim xpending xgroup|delconsumer: stream
consumer xinfo|stream xinfo|groups xlen: stream
consumer hget hmget hset hdel hlen exists: tickets attempts noted
consumer pexpire hscan: lease noted
consumer get getex set exists pttl: lease
consumer watch: lease attempts
consumer del: lease inbox
consumer xread xrange xtrim: inbox
consumer xadd xdel xlen xrevrange: runs dead changed
consumer zadd zscore zlexcount zrem: letters
consumer hget hdel: consumers
consumer xadd xlen pexpire memory|usage: replies
streamer xadd xinfo|stream: stream
streamer get getex set del pexpire pttl: leader
streamer hget hset hdel: counters
reader xread xrange xrevrange xinfo|stream: stream
reader hget hset hdel: checkpoints
auditor type xrange xrevrange xlen xpending xinfo|stream xinfo|groups xinfo|consumers \
get pttl exists hget hgetall hmget hscan hlen mget zlexcount zrangebylex zrevrangebylex: stream all log.archived
auditor hset: archived
auditor set: audit log.archived
"""
_OF_GROUP = _words("stream taken tickets attempts runs dead changed letters consumers archived audit")
_OF_LOG = _words("delayed behind leader counters checkpoints")
_MASTER = _words(
    "begin reject note_cut take_back sweep save_position recount_letters count_letters "
    "drain deregister forget_attempts elect "
    "next_generation register redrive read_letters trim change_rules "
    "order find_entries send read_fields "
    "due_delayed send_delayed move_delayed"
)
_GATHERING = ("gather", "look_at_sources")
_MASTER_SENDS = _words(
    "xread xreadgroup xrange xrevrange xlen xpending xinfo|stream xinfo|groups xinfo|consumers xgroup|create "
    "watch xclaim hset set memory|usage client|tracking get getex mget pttl exists hget hgetall hmget hscan hlen hdel "
    "pexpire xadd time zrange zcard zcount zrank zscore xdel zrem type"
)
_HEAD = """\
# Users of Redis ({version}) for Usher, with the rights that each kind of program needs and no more. Made by
# `usher acl --ticket-stream {stream} --group {group}{server}`.
# Use: give each user that you need a password (`on >the-password` in place of `off resetpass`, or
# `on #sha256-of-it`), then `include` this file in redis.conf; or, for ACL LOAD,
# `grep ^user users.acl > /etc/redis/aclfile`: an aclfile may have no comments.
# Programs name their user in the URL: redis://consumer:the-password@host:6379/0.
# The user `default` has no rights; keep a user of your own for administration: `user admin on >... ~* &* +@all`.
# What rights cannot do, above all on Redis 6.2, where they are not by key: docs/security.md.
"""
_NOBODY = "user default off resetpass resetkeys resetchannels -@all"
#: The user with all rights, in a file with passwords.
ADMIN = "admin"
#: The names of all users of a file with passwords.
USERS = ("producer", "sender", "consumer", "master", "streamer", "reader", "auditor", ADMIN)


def acl_file(
    stream: str,
    group: str,
    sources: Sequence[str] = (),
    passwords: Mapping[str, str] | None = None,
    *,
    selectors: bool = True,
) -> str:
    """Return the whole file; see ``programs``. With ``passwords``, one for each of ``USERS``, it is a ready aclfile
    with only their hashes, and without comments, which Redis refuses there. Without ``selectors`` it is for Redis 6.2.
    Raises StartRefused for a stream name that would end its word in the file, or begin a line."""
    if odd := [name for name in (stream, *sources) if _ENDS_WORD.search(name)]:
        raise StartRefused(
            "a stream with a space, a line break, a quote or a bracket in its name cannot stand in an ACL file:"
            f" {', '.join(map(repr, odd))}"
        )
    if passwords:
        found = programs(stream, group, sources)
        lines = [_NOBODY, *(program.line(passwords[program.name], selectors=selectors) for program in found)]
        return "\n".join([*lines, f"user {ADMIN} {_entry(passwords[ADMIN])} ~* &* +@all"]) + "\n"
    version, server = ("7 or later", "") if selectors else ("6.2", " --server 6.2")
    lines = [_HEAD.format(stream=",".join(sources) or stream, group=group, version=version, server=server), _NOBODY]
    for program in programs(stream, group, sources):
        lines += ["", f"# {program.about}", program.line(selectors=selectors)]
    return "\n".join(lines) + "\n"


def _entry(password: str) -> str:
    return f"on resetpass #{hashlib.sha256(password.encode()).hexdigest()}" if password else "off resetpass"


def _escape_pattern(name: str) -> str:
    return re.sub(r"([*?\[\]\\^])", r"\\\1", name)
