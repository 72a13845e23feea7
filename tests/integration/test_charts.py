"""The charts on a real Redis: a leader writes them, its successor goes on, a deposed one writes nothing, and any master
shows them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.integration.factories import World
from usher.common.base.clock import wall_ms
from usher.common.base.errors import Fenced
from usher.common.protocol.run_log import RunRecord, encode
from usher.common.redis.client import Link
from usher.master.insight import charts
from usher.master.insight.charts import ALL, SPANS, ChartKeeper, read_points
from usher.master.leader.elector import Lead


def _keeper(world: World, epoch: int, **more: Any) -> ChartKeeper:
    lead = Lead()
    lead._set(epoch, "http://one")
    return ChartKeeper(world.link, world.keys, lead, **more)


def _ran(world: World, number: int, outcome: str = "done") -> None:
    now_us = 1000 * wall_ms()
    runs = [RunRecord("a:1", "t", f"{now_us // 1000 - 50}-{n}", 1, 1, now_us, now_us + 7_000) for n in range(number)]
    record = encode("a:1", [*map(_as_executed, runs)], [outcome] * number)
    world.link.call("XADD", world.keys.runs, "*", "batch", record)


def _as_executed(run: RunRecord) -> Any:
    return SimpleNamespace(**run._asdict() | {"ticket": run.ticket.encode(), "stream_id": run.id.encode()})


def _age(world: World, ms: int) -> None:
    """Make all points that many milliseconds older."""
    rows = world.link.call("HGETALL", world.keys.charts)
    kept = [found for value in rows[1::2] if (found := charts.decode(value))]
    world.link.call("DEL", world.keys.charts)
    for one in kept:
        one["t"] -= ms
        one["at"] -= ms
        world.link.call("HSET", world.keys.charts, charts.place_of(one["t"]), charts.encode(one))


def test_a_successor_goes_on_where_the_leader_ended(world: World) -> None:
    former = world.elect()
    world.send_many([b"t"] * 3)
    _keeper(world, former.epoch).run_once()
    of = world.link, world.keys
    (point,) = read_points(*of, SPANS["1h"])[1]
    assert (point["sent"], point["consumers"]) == (None, {})
    _age(world, 120_000)
    world.send_many([b"t"] * 5)
    _ran(world, 4)
    _ran(world, 2, "failed")
    successor = _keeper(world, world.elect("http://two", succeed=str(former.epoch)).epoch)
    for _ in range(2):  # the same minute twice changes nothing
        successor.run_once()
        _, points = read_points(*of, SPANS["1h"])
        assert points[-1]["sent"] == 5
        part = points[-1]["consumers"][ALL]
        took = sum(count for name, count in part.items() if name[0] == "t")
        assert (part["done"], part["failed"], took) == (4, 2, 6)
        day = read_points(*of, SPANS["24h"])[1]
        assert sum(one["consumers"].get(ALL, {"done": 0})["done"] for one in day) == 4


def test_a_deposed_leader_writes_nothing(world: World) -> None:
    former = world.elect()
    keeper = _keeper(world, former.epoch)
    world.elect("http://two", succeed=str(former.epoch))
    keeper.run_once()
    assert not world.link.call("EXISTS", world.keys.charts)
    assert keeper._lead.epoch is None
    with pytest.raises(Fenced):
        former.note_chart("m0", b"{}")


def test_of_a_long_run_log_a_part_is_read_and_told(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charts, "_RUN_BYTES", 12_000)
    monkeypatch.setattr(charts, "_RECORDS", 2)
    for _ in range(60):
        _ran(world, 20)
    _keeper(world, world.elect().epoch).run_once()
    (point,) = read_points(world.link, world.keys, SPANS["1h"])[1]
    assert point["in_part"]
    assert 0 < point["consumers"][ALL]["done"] < 1200


def test_tenants_have_what_they_were_given_since_the_former_point(world: World) -> None:
    told = {"x": (10, 2, 1.0, False), "y": (1, 0, 2.0, True)}
    keeper = _keeper(world, world.elect().epoch, tenants=lambda: told)
    keeper.run_once()
    told["x"] = (14, 0, 1.0, False)
    keeper.run_once()
    (point,) = read_points(world.link, world.keys, SPANS["1h"])[1]
    assert point["tenants"] == {"x": [4, 0, 1.0, False], "y": [0, 0, 2.0, True]}


def test_a_work_stream_has_charts_of_each_source(world: World) -> None:
    now_us = 1000 * wall_ms()
    runs = [RunRecord("a:1", f"shop:{n}/7", f"{now_us // 1000}-{n}", 1, 1, now_us, now_us + 7_000) for n in range(2)]
    world.link.call(
        "XADD", world.keys.runs, "*", "batch", encode("a:1", [*map(_as_executed, runs)], ["done", "failed"])
    )
    epoch = world.elect().epoch
    for by_stream, found in ((False, {}), (True, {"shop:0": (1, 0), "shop:1": (0, 1)})):
        world.link.call("DEL", world.keys.charts)
        _keeper(world, epoch, by_stream=by_stream).run_once()
        for span in SPANS.values():
            (point,) = read_points(world.link, world.keys, span)[1]
            assert {name: (part["done"], part["failed"]) for name, part in point["sources"].items()} == found


def test_a_redis_without_group_or_stream_has_a_point_too(link: Link) -> None:
    world = World(link)
    epoch = world.elect().epoch
    link.call("DEL", world.keys.stream)
    link.call("SET", world.keys.failures, "of another type")
    _keeper(world, epoch).run_once()
    assert read_points(link, world.keys, SPANS["1h"])[1][0]["lag"] == 0
    world.make_group()


def test_a_point_tells_who_started_who_leads_and_what_code_is_new(world: World) -> None:
    leader = world.elect()
    started = [world.join(name).incarnation for name in ("a", "b")]
    fleet = {f"old:{1024 * 1000}": "4f1c2aa", started[0]: "4f1c2aa"}
    keeper, of = _keeper(world, leader.epoch, fleet=lambda: fleet), (world.link, world.keys)
    keeper.run_once()
    told = {(what, name) for point in read_points(*of, SPANS["1h"])[1] for _, what, name in point["marks"]}
    assert told == {("leader", "one"), ("start", "a")}, "what is older is no news, nor is the code of the beginning"
    _age(world, 61_000)
    fleet[started[1]] = "b0b0b0b"
    keeper.run_once()
    point = read_points(*of, SPANS["1h"])[1][-1]
    assert ("deploy", "b0b0b0b") in {(what, name) for _, what, name in point["marks"]}
    assert point["codes"] == ["4f1c2aa", "b0b0b0b"]
