"""Find out, without running anything, whether the user of this connection may run all that Usher needs.

``ACL DRYRUN`` answers for a user by name, but is new (7.0) and often forbidden itself. Else each command is queued in a
MULTI, where Redis checks the rights, and the MULTI is discarded: nothing runs. Where that is forbidden too, a few
commands are tried on a key that is not there: they can show that rights are missing, but not that none is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from usher.common.base.errors import NotNow
from usher.common.doctor.facts import Rights
from usher.common.protocol.keys import MASTER, Keys, LogKeys, uid_key
from usher.common.protocol.sources import SourceSelection
from usher.common.redis.acl import programs
from usher.common.redis.client import Arg, CommandRefused, Link

Command = tuple[Arg, ...]


def needed(keys: Keys) -> list[Command]:
    """Return one well-formed call of every command that masters and consumers send or that their scripts run, on the
    keys they run it on."""
    stream, group, inbox, lease = keys.stream, keys.group, keys.inbox("a:1"), keys.lease("a:1")
    return [
        ("TIME",),
        ("INFO",),
        ("EVAL", "return 1", 1, keys.leader),
        ("EVALSHA", "0" * 40, 1, keys.leader),
        ("EVALSHA", "0" * 40, 1, lease),
        ("XADD", stream, "*", "f", "v"),  # a dead letter that is redriven
        ("XADD", keys.dead, "*", "f", "v"),
        ("XADD", keys.changed, "MAXLEN", "~", 1, "*", "f", "v"),
        ("XREAD", "STREAMS", keys.changed, "0"),
        ("XADD", keys.actions, "MAXLEN", "~", 1, "*", "f", "v"),
        ("XREVRANGE", keys.actions, "+", "-", "COUNT", 1),
        ("XADD", inbox, "*", "f", "v"),
        ("XADD", keys.runs, "MAXLEN", "~", 1, "*", "f", "v"),
        ("XREAD", "STREAMS", stream, "0"),
        ("XREAD", "STREAMS", inbox, "0"),
        ("XREADGROUP", "GROUP", group, MASTER, "COUNT", 1, "STREAMS", stream, ">"),
        ("XACK", stream, group, "0-1"),
        ("XCLAIM", stream, group, MASTER, 0, "0-1", "JUSTID"),
        ("XAUTOCLAIM", stream, group, MASTER, 0, "0-0"),
        ("XPENDING", stream, group),
        ("XRANGE", stream, "-", "+", "COUNT", 1),
        ("XREVRANGE", keys.dead, "+", "-", "COUNT", 1),
        ("XLEN", stream),
        ("XTRIM", inbox, "MINID", "0"),
        ("XDEL", keys.dead, "0-1"),
        ("XINFO", "STREAM", stream),
        ("XINFO", "GROUPS", stream),
        ("XINFO", "CONSUMERS", stream, group),
        ("XGROUP", "CREATE", stream, group, "0", "MKSTREAM"),
        ("XGROUP", "DELCONSUMER", stream, group, "nobody"),
        ("HGET", keys.tickets, "f"),
        ("HMGET", keys.tickets, "f"),
        ("HGETALL", keys.consumers),
        ("HSCAN", keys.tickets, 0),
        ("HLEN", keys.tickets),
        ("HSET", keys.tickets, "f", "v"),
        ("HDEL", keys.tickets, "f"),
        ("HSET", LogKeys(stream).groups, group, "0-0"),
        ("HSET", keys.rules, "f", "v"),
        ("HGETALL", keys.rules),
        ("GET", lease),
        ("SET", lease, "v", "PX", 1),
        ("EXISTS", lease),
        ("PTTL", lease),
        ("PEXPIRE", lease, 1),
        ("DEL", inbox),
        *_needed_for_delayed(LogKeys(stream)),
    ]


def _needed_for_delayed(log: LogKeys) -> list[Command]:
    """Return the commands for delayed messages."""
    return [
        ("XADD", log.delayed, "*", "f", "v"),
        ("XDEL", log.delayed, "0-1"),
        ("XREAD", "STREAMS", log.delayed, "0"),
        ("ZADD", log.due, 1, "f"),
        ("ZREM", log.due, "f"),
        ("ZRANGE", log.due, 0, 0),
        ("ZRANGEBYSCORE", log.due, 0, 1),
        ("ZSCORE", log.due, "f"),
        ("ZCARD", log.due),
        ("GET", log.due_until),
        ("SET", log.due_until, "0-0"),
    ]


def needed_of_sources(keys: Keys, sources: SourceSelection) -> list[Command]:
    """Return the commands that masters run on each of several ticket streams. One name that a pattern matches stands
    for all."""
    found: list[Command] = [
        ("XADD", keys.stream, "*", "f", "v"),
        ("HSETNX", keys.gathered, "f", "v"),
        ("HEXISTS", keys.gathered, "f"),
    ]
    found += [("XSETID", keys.stream, "0-1"), ("HGETALL", keys.shares)]
    for source in (*sources.names, *(re.sub(r"[*?]", "1", pattern) for pattern in sources.patterns)):
        found += [
            ("XREADGROUP", "GROUP", keys.group, "gather", "COUNT", 1, "NOACK", "STREAMS", source, ">"),
            ("XGROUP", "CREATE", source, keys.group, "0"),
            ("XGROUP", "SETID", source, keys.group, "0"),
            ("XINFO", "STREAM", source),
            ("XPENDING", source, keys.group),
            ("HSET", LogKeys(source).groups, keys.group, "0-0"),
            ("XTRIM", source, "MINID", "0"),
            ("HGETALL", LogKeys(source).checkpoints),
            ("GET", LogKeys(source).archived),
            ("TYPE", source),
        ]
    return [*found, ("SCAN", 0, "COUNT", 1)] if sources.patterns else found


def _needed_by_others(keys: Keys) -> list[Command]:
    """Return the commands that neither masters nor consumers run, but streamers, log consumers, senders and
    auditors."""
    log, uid = LogKeys(keys.stream), uid_key(keys.stream, b"u")
    return [
        *(("EVALSHA", "0" * 40, 1, key) for key in (log.leader, log.checkpoints, uid)),
        ("SET", log.leader, "v", "PX", 1),
        ("GET", log.leader),
        ("PTTL", log.leader),
        ("HSET", log.counters, "f", "v"),
        ("WAIT", 0, 0),
        ("HGET", log.checkpoints, "f"),
        ("HSET", log.checkpoints, "f", "v"),
        ("HDEL", log.checkpoints, "f"),
        ("GET", uid),
        ("SET", uid, "v", "PX", 1),
        ("GET", log.archived),
        ("SET", log.archived, "0-0"),
    ]


def find_rights(link: Link, keys: Keys, sources: SourceSelection | None = None) -> Rights:
    """Return the rights, and what is missing. Raises RedisTrouble when Redis cannot be reached."""
    commands = needed(keys) + (needed_of_sources(keys, sources) if sources is not None else [])
    [who] = link.pipeline([("ACL", "WHOAMI")])
    user = who.decode(errors="replace") if isinstance(who, bytes) else None
    if user is not None:
        answers = link.pipeline(
            [("ACL", "DRYRUN", user, *command) for command in (*commands, *_needed_by_others(keys))]
        )
        if answers[0] == b"OK":  # TIME: it takes no key, so this says that we may ask
            return _found(keys, user, commands, [_refusal(answer) for answer in answers], "ACL DRYRUN")
    return _queued(link, keys, user, commands)


def _refusal(answer: object) -> object:
    """Return DRYRUN's answer in the form that the command itself would have got: OK, or a sentence that names what is
    missing."""
    return answer if answer == b"OK" else CommandRefused(f"NOPERM {answer!r}")


def _queued(link: Link, keys: Keys, user: str | None, commands: Sequence[Command]) -> Rights:
    """Queue all commands in a MULTI that is discarded. MULTI is asked alone: if it were refused, the rest would run."""
    [begun] = link.pipeline([("MULTI",)])
    if begun != b"OK":
        return _tried(link, keys, user, begun)
    *replies, _ = link.pipeline([*commands, *_needed_by_others(keys), ("DISCARD",)])
    for reply in replies:
        if isinstance(reply, NotNow):
            return Rights(user, None, f"not now: {reply}")
    return _found(keys, user, commands, replies, "MULTI")


def _found(keys: Keys, user: str | None, commands: Sequence[Command], replies: Sequence[object], how: str) -> Rights:
    """Return the rights from the replies to ``commands``, followed by those to what others need."""
    answers = list(zip([*commands, *_needed_by_others(keys)], replies, strict=True))
    refused = [command for command, reply in answers if _is_refused(reply)]
    kinds = [program for program in programs(keys.stream, keys.group) if program.connects]
    enough_for = tuple(program.name for program in kinds if not any(program.uses(command) for command in refused))
    own = [answer for program in kinds if program.name == user for answer in answers if program.uses(answer[0])]
    missing = _missing(commands, replies[: len(commands)])
    return Rights(user, missing, how, enough_for if missing else (), _missing(*zip(*own, strict=True)) if own else ())


def _is_refused(reply: object) -> bool:
    return isinstance(reply, CommandRefused) and "NOPERM" in str(reply)


def _tried(link: Link, keys: Keys, user: str | None, refusal: object) -> Rights:
    absent = keys.prefix + "absent"
    commands: list[Command] = [
        ("XAUTOCLAIM", absent, keys.group, MASTER, 0, "0-0"),
        ("XPENDING", absent, keys.group),
        ("XACK", absent, keys.group, "0-1"),
        ("XREADGROUP", "GROUP", keys.group, MASTER, "COUNT", 1, "STREAMS", absent, ">"),
        ("XRANGE", absent, "-", "+", "COUNT", 1),
        ("HGET", absent, "f"),
        ("HDEL", absent, "f"),
        ("EXISTS", absent),
        ("EVAL", "return 1", 1, absent),
    ]
    missing = _missing(commands, link.pipeline(commands))
    why = f"ACL DRYRUN and MULTI are refused ({refusal})"
    return Rights(user, missing or None, f"{why}; tried on a key that is not there" if missing else why)


def _missing(commands: Sequence[Command], replies: Sequence[object]) -> tuple[str, ...]:
    """Return the names of the commands that were refused for lack of rights, each once; with the subcommand where there
    is one."""
    names: dict[str, None] = {}
    for command, reply in zip(commands, replies, strict=True):
        if _is_refused(reply):
            words = command[:2] if command[0] in ("XINFO", "XGROUP") else command[:1]
            names[" ".join(map(str, words))] = None
    return tuple(names)
