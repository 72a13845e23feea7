"""A ticket id that stands in JSON (USHER_TICKET_FIELD=payload.order.id): scripts and Python read the same, or none."""

from __future__ import annotations

import json
import random
from typing import Any

from tests.integration.factories import World, read
from tests.integration.gathered import Gathered
from usher.common.protocol.message import ticket_value
from usher.common.redis.client import Link
from usher.common.sending.producer import Producer
from usher.master.insight.stats import tickets_of
from usher.master.leader.entries import PeekedEntry
from usher.master.leader.leader_scripts import LeaderScripts

_PATH = "payload.order.id"
_BIG = b'{"order": {"id": "42", "text": "%s"}}'

#: The field ``payload``, and the ticket that it names.
_READ: list[tuple[bytes, bytes | None]] = [
    (b'{"order": {"id": "42"}}', b"42"),
    (b' {"order": {"id": "a.b \\u00e9\\n"}, "more": [1, {}]} ', "a.b é\n".encode()),
    (b'{"order": {"id": ""}}', b""),
    (b'{"order": {"id": 42}}', b"42"),
    (b'{"order": {"id": -7}}', b"-7"),
    (b'{"order": {"id": 0}}', b"0"),
    (b'{"order": {"id": -0.0}}', b"0"),
    (b'{"order": {"id": 9007199254740991}}', b"9007199254740991"),
    (b'{"order": {"id": 9007199254740992}}', None),
    (b'{"order": {"id": 9007199254740993}}', None),
    (b'{"order": {"id": 123456789012345678901}}', None),
    (b'{"order": {"id": 1e400}}', None),
    (b'{"order": {"id": 1.5}}', None),
    (b'{"order": {"id": true}}', None),
    (b'{"order": {"id": null}}', None),
    (b'{"order": {"id": {"id": "42"}}}', None),
    (b'{"order": {"id": ["42"]}}', None),
    (b'{"order": ["42"]}', None),
    (b'{"order": "42"}', None),
    (b'{"order": null}', None),
    (b'{"id": "42"}', None),
    (b'{"order": {"id": "42"}', None),
    (b'{"order": {"id": "\\ud800"}}', None),
    (b'{"order": {"id": 42, "x": NaN}, "y": [-Infinity, 1e400]}', b"42"),
    (b'{"order": {"id": "K\xf6ln", "tab": "\t"}}', b"K\xf6ln"),
    (b'{"order": {"id": "42", "x": "\\ud800"}}', None),
    (b"null", None),
    (b"", None),
    (_BIG % (b"x" * (65_536 - len(_BIG) + 2)), b"42"),
    (_BIG % (b"x" * (65_536 - len(_BIG) + 3)), None),
]


def leader_of(world: World, field: str = _PATH) -> LeaderScripts:
    return LeaderScripts(world.scripts, world.keys, world.elect().epoch, field)


def test_scripts_and_python_read_the_same_ticket_or_none(world: World) -> None:
    for at, (body, _) in enumerate(_READ):
        world.add(b"%d-1" % (at + 1), "payload", body, "n", b"1")
    assert [found.ticket for found in read(leader_of(world), 100).found] == [ticket for _, ticket in _READ]
    assert [ticket_value([b"payload", body], _PATH.encode()) for body, _ in _READ] == [ticket for _, ticket in _READ]


def a_value(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(5 if depth else 3)
    if kind == 0:
        return rng.choice([None, True, 0, -1, 2**53 - 1, 2**53, 2**64, 1.5, 3.0, 1e22, -0.0, 10**25])
    if kind == 1:
        return "".join(rng.choice(["a", '"', "\\", "é", "\U0001f600", " ", "/", "\t"]) for _ in range(rng.randrange(4)))
    if kind == 2:
        return rng.randrange(-(10**17), 10**17)
    if kind == 3:
        return [a_value(rng, depth - 1) for _ in range(rng.randrange(3))]
    return {key: a_value(rng, depth - 1) for key in rng.sample(["order", "id", "0", "x"], rng.randrange(1, 4))}


def test_whatever_the_json_is(world: World) -> None:
    rng = random.Random(40)
    bodies = [json.dumps({"order": {"id": a_value(rng, 2)}}, ensure_ascii=at % 2 == 0).encode() for at in range(300)]
    bodies += [json.dumps(a_value(rng, 4)).encode() for _ in range(300)]
    for at, body in enumerate(bodies):
        world.add(b"%d-1" % (at + 1), "payload", body)
    seen = [found.ticket for found in read(leader_of(world), 1000).found]
    assert seen == [ticket_value([b"payload", body], _PATH.encode()) for body in bodies]
    assert len({*seen}) > 30


def test_a_field_of_that_very_name_wins_and_is_what_a_producer_sends(world: World) -> None:
    sent = Producer(world.link, world.keys.stream, _PATH)
    sent.send("7", {"payload": '{"order": {"id": "42"}}'})
    sent.send(None, {"payload": '{"order": {"id": "42"}}'})
    assert [found.ticket for found in read(leader_of(world), 10).found] == [b"7", b"42"]
    flat = [b"payload", b'{"order": {"id": "42"}}', _PATH.encode(), b"7"]
    assert ticket_value(flat, _PATH.encode()) == b"7"


def test_what_only_redis_takes_for_json_names_no_ticket(world: World) -> None:
    """It becomes a dead letter before any script reads it."""
    entry_id = world.add(b"1-1", "payload", b'{"order": {"id": 0x2a}}')
    assert read(leader_of(world), 10).found == [PeekedEntry(entry_id, None)]


def test_all_scripts_of_the_leader_read_it(world: World) -> None:
    entry_id = world.add(b"1-1", "payload", b'{"order": {"id": 42}}')
    leader = leader_of(world)
    world.link.call("XREADGROUP", "GROUP", world.keys.group, "master", "STREAMS", world.keys.stream, ">")
    assert [(found.id, found.ticket) for found in leader.read_parked(None, 10).found] == [(entry_id, b"42")]
    assert list(tickets_of(world.scripts, world.keys, _PATH, [entry_id])) == [(entry_id, b"42")]
    assert world.scripts.run("find_entries", (world.keys.stream,), ("XRANGE", "-", "+", 10, _PATH, "42"))[2] == [
        entry_id
    ]


def test_gathered_streams_too(link: Link) -> None:
    gathered = Gathered(link)
    gathered.ticket_field = _PATH
    link.call("XADD", "orders", "*", "payload", b'{"order": {"id": 42}}')
    link.call("XADD", "orders", "*", "payload", b'{"order": {"id": 1.5}}')
    gathered.gather("orders")
    named = [ticket_value(flat, b"usher_ticket") for _, flat in link.call("XRANGE", gathered.keys.stream, "-", "+")]
    assert named == [b"orders/42", None]
