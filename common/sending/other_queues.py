"""Read the queues of Celery, RQ and BullMQ on Redis: each job becomes a message, or stays with its reason.

Read are the layouts of Celery 5 (kombu's Redis transport), RQ 3 and BullMQ 6. Nothing that a job holds is
run: pickled jobs stay.
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from usher.common.base.errors import MessageUndecodable
from usher.common.protocol.message import check_ticket
from usher.common.redis.client import Link
from usher.common.redis.replies import pairs
from usher.common.sending.producer import LONGEST_UID, Outgoing

_EXACT = 2**53
#: Jobs of one look, and of one batch that is sent.
PAGE = 100
#: Most bytes of a job's arguments once unpacked; a larger one stays.
_LARGEST = 16 * 1024 * 1024


class Stays(Exception):
    """The job is not imported; the message says why."""


class WaitingJob(NamedTuple):
    """A job as its queue has it. ``item``: what stands in the list. ``message`` None: it stays, because of ``why``."""

    queue: bytes
    item: bytes
    message: Outgoing | None
    why: str


class Layout(NamedTuple):
    """The place of a queue. ``lists``: those whose jobs wait for a worker, in the order in which workers take
    from them; ``oldest``: their end from which workers take. ``beside``: what waits or runs elsewhere and is only
    counted. ``job``: the key of a job's hash; None where the list has the job itself."""

    lists: Callable[[Link, str], list[bytes]]
    oldest: int
    beside: Callable[[str], dict[str, str]]
    job: Callable[[str, str], str] | None
    #: Of what stands in the list and the job's hash: what no other job ever has, its name, its arguments.
    read: Callable[[bytes, Mapping[bytes, bytes]], tuple[str, str, Any]]


def waiting(
    link: Link, layout: Layout, queue: str, ticket: str, taken: Callable[[], int]
) -> Iterator[list[WaitingJob]]:
    """Yield the jobs that wait, the next one first, in pages. ``taken``: how many jobs of all former pages are no
    longer in their list."""
    for key in layout.lists(link, queue):
        seen, before = 0, taken()
        while True:
            at = seen - (taken() - before)
            from_to = (at, at + PAGE - 1) if layout.oldest == 0 else (-at - PAGE, -at - 1)
            items = link.call("LRANGE", key, *from_to)
            if layout.oldest:
                items.reverse()
            if not items:
                break
            hashes: list[Any] = [[]] * len(items)
            if layout.job is not None:
                names = [layout.job(queue, item.decode("utf-8", "surrogateescape")) for item in items]
                hashes = link.all_of([("HGETALL", name.encode("utf-8", "surrogateescape")) for name in names])
            yield [
                _waiting(layout, key, item, dict(pairs(found)), ticket)
                for item, found in zip(items, hashes, strict=True)
            ]
            seen += len(items)


def beside(link: Link, layout: Layout, queue: str) -> dict[str, int]:
    """Count what no import takes: jobs that run, wait for later, or for others."""
    counts = {"list": "LLEN", "zset": "ZCARD", "hash": "HLEN"}
    found = {}
    for what, key in layout.beside(queue).items():
        command = counts.get(link.call("TYPE", key).decode())
        number = int(link.call(command, key)) if command else 0
        if number:
            found[what] = number
    return found


def remove(link: Link, layout: Layout, queue: str, job: WaitingJob) -> bool:
    """Remove a job from its queue; return False if it is no longer there: a worker has it, or had it."""
    end = 1 if layout.oldest == 0 else -1
    if not link.call("LREM", job.queue, end, job.item):
        return False
    if layout.job is not None:
        link.call("DEL", layout.job(queue, job.item.decode()))
    return True


def _waiting(layout: Layout, key: bytes, item: bytes, found: Mapping[bytes, bytes], ticket: str) -> WaitingJob:
    try:
        job, kind, body = layout.read(item, found)
        if not kind:
            raise Stays("it has no name")
        text = json.dumps(body, ensure_ascii=False, allow_nan=False)
        uid = f"{key.decode()}:{job}"
        if len(uid.encode()) > LONGEST_UID:
            raise Stays("its id is too long")
        text.encode(), kind.encode()  # a lone surrogate is no text
        return WaitingJob(key, item, Outgoing(_ticket(body, ticket), {"kind": kind, "body": text}, uid), "")
    except Stays as stays:
        return WaitingJob(key, item, None, str(stays))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, binascii.Error, zlib.error):
        return WaitingJob(key, item, None, "it cannot be read")


def _ticket(body: Any, path: str) -> str:
    value = body
    for step in path.split("."):
        if isinstance(value, list):
            value = value[int(step)] if step.isdecimal() and int(step) < len(value) else None
        else:
            value = value.get(step) if isinstance(value, dict) else None
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < _EXACT:
        value = str(value)
    if not isinstance(value, str):
        raise Stays(f"it has no {path} that is a text or a whole number")
    try:
        return check_ticket(value.encode()).decode()
    except MessageUndecodable as unfit:
        raise Stays(f"its {path} is no ticket id: {unfit}") from None


def _celery_lists(link: Link, queue: str) -> list[bytes]:
    # kombu names the lists of lower priorities with its own separator; 0 comes first and has none.
    prefix, cursor = queue.encode() + b"\x06\x16", b"0"
    found: set[bytes] = set()
    while True:
        cursor, keys = link.call("SCAN", cursor, "COUNT", 1000, "MATCH", _literal(prefix) + b"*")
        found.update(key for key in keys if key[len(prefix) :].isdigit())
        if cursor == b"0":
            return [queue.encode(), *sorted(found, key=lambda key: int(key[len(prefix) :]))]


def _literal(name: bytes) -> bytes:
    return b"".join(b"\\" + bytes([one]) if one in b"*?[]^\\" else bytes([one]) for one in name)


def _celery(item: bytes, _found: Mapping[bytes, bytes]) -> tuple[str, str, Any]:
    sent = json.loads(item)
    headers = sent["headers"]
    if sent.get("content-type") != "application/json":
        raise Stays(f"its arguments are no JSON but {sent.get('content-type')}")
    for name, why in (("eta", "it is for later"), ("expires", "it expires"), ("chord", "it belongs to a chord")):
        if headers.get(name):
            raise Stays(why)
    body = sent["body"]
    if sent["properties"].get("body_encoding") == "base64":
        body = base64.b64decode(body, validate=True)
    if headers.get("compression"):
        raise Stays("it is compressed")
    args, kwargs, embedded = json.loads(body)
    if any((embedded or {}).values()):
        raise Stays("it has callbacks, or belongs to a chain or chord")
    job = f"{headers['id']}:{sent['properties']['delivery_tag']}"
    return job, headers["task"], {"args": args, "kwargs": kwargs}


def _rq(item: bytes, found: Mapping[bytes, bytes]) -> tuple[str, str, Any]:
    if not found:
        raise Stays("its hash is gone")
    if found.get(b"group_id") or found.get(b"repeats_left") or found.get(b"success_callback_name"):
        raise Stays("it repeats, is one of a group, or has a callback")
    unpacker = zlib.decompressobj()
    try:
        data = unpacker.decompress(found[b"data"], _LARGEST)
    except zlib.error:
        data = found[b"data"]
    if unpacker.unconsumed_tail:
        raise Stays("it is too large")
    if data[:1] != b"[":
        raise Stays("it is pickled: reading it could run anything")
    function, instance, args, kwargs = json.loads(data)
    if instance is not None:
        raise Stays("it calls a method of an object")
    job = f"{item.decode()}:{found.get(b'enqueued_at', b'').decode()}"
    return job, function, {"args": args, "kwargs": kwargs}


def _bullmq(item: bytes, found: Mapping[bytes, bytes]) -> tuple[str, str, Any]:
    if not found:
        raise Stays("its hash is gone")
    if found.get(b"parent") or found.get(b"parentKey"):
        raise Stays("a parent waits for it")
    if found.get(b"rjk"):
        raise Stays("it is of a repeatable job")
    job = f"{item.decode()}:{found[b'timestamp'].decode()}"
    return job, found[b"name"].decode(), json.loads(found[b"data"])


LAYOUTS: dict[str, Layout] = {
    "celery": Layout(
        _celery_lists,
        -1,
        lambda queue: {"taken by workers, of all queues, and for later": "unacked"},
        None,
        _celery,
    ),
    "rq": Layout(
        lambda link, queue: [f"rq:queue:{queue}".encode()],
        0,
        lambda queue: {
            "taken by workers": f"rq:wip:{queue}",
            "for later": f"rq:scheduled:{queue}",
            "waiting for other jobs": f"rq:deferred:{queue}",
            "failed": f"rq:failed:{queue}",
        },
        lambda queue, job: f"rq:job:{job}",
        _rq,
    ),
    "bullmq": Layout(
        lambda link, queue: [f"bull:{queue}:{name}".encode() for name in ("wait", "paused")],
        -1,
        lambda queue: {
            "taken by workers": f"bull:{queue}:active",
            "with a priority": f"bull:{queue}:prioritized",
            "for later": f"bull:{queue}:delayed",
            "waiting for other jobs": f"bull:{queue}:waiting-children",
            "failed": f"bull:{queue}:failed",
        },
        lambda queue, job: f"bull:{queue}:{job}",
        _bullmq,
    ),
}
