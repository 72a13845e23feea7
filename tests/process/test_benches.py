"""`usher bench`: a short run of measures that need whole systems. Their figures are nobody's here; that they end, and
tell what they should."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.process.machine import ROOT

pytestmark = pytest.mark.process


def _bench(*words: str) -> dict[str, Any]:
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks", *words, "--no-aof", "--json"], cwd=ROOT, capture_output=True, timeout=240
    )
    assert ended.returncode == 0, ended.stderr.decode()
    document: dict[str, Any] = orjson.loads(ended.stdout)
    assert document["machine"]["cores"]
    return document


@pytest.mark.slow
def test_a_crowd_registers_is_handed_what_it_may_have_and_the_others_do_the_work(tmp_path: Path) -> None:
    document = _bench("consumers", "--registered", "30", "--messages", "2000", "--consumers", "1", "--runs", "1")
    (run,) = document["runs"]
    assert run["registered"] == 30
    assert run["ratio"] == pytest.approx(run["messages_per_second"] / run["floor_per_second"], rel=0.05)
    assert "crowd" in run["cpu_seconds"]


@pytest.mark.slow
@pytest.mark.parametrize("handlers", ["wait", "await"])
def test_handlers_that_wait_are_told_beside_what_their_slots_can_do_at_most(tmp_path: Path, handlers: str) -> None:
    words = ("--handlers", handlers, "--messages", "2000", "--consumers", "1", "--slots", "16", "--runs", "1")
    (run,) = _bench("scale", *words)["runs"]
    assert (run["handlers"], run["slots"], run["floor_per_second"]) == (handlers, 16, 1600)
    assert 0 < run["ratio"] <= run["bare_ratio"]
    assert run["ratio"] * 1600 == pytest.approx(run["bare_ratio"] * run["bare_per_second"], rel=0.01)
    assert 0 < run["bare_per_second"] <= 1600, "it sleeps as long, in as many slots"


@pytest.mark.slow
def test_latency_is_told_beside_that_of_bare_consumers(tmp_path: Path) -> None:
    document = _bench("latency", "--rate", "1000", "--seconds", "2", "--consumers", "1", "--runs", "1")
    (run,) = document["runs"]
    assert run["bare_timed"] == 2000
    assert run["timed"] >= 1800
    assert run["p99_ratio"] == pytest.approx(run["p99_ms"] / run["bare_p99_ms"], abs=0.01)
    assert document["bare_p50_ms"] == run["bare_p50_ms"] > 0


@pytest.mark.slow
def test_every_page_is_loaded_both_ways_while_messages_come(tmp_path: Path) -> None:
    document = _bench("page", "--pending", "200", "--rate", "100", "--gets", "3", "--consumers", "1")
    rows = document["runs"]
    assert {(row["page"], row["keep_alive"]) for row in rows} == {
        (row["page"], kept) for row in rows for kept in (True, False)
    }
    assert {"/", "/tickets", "/consumers", "/dead-letters", "/streams", "/doctor"} <= {row["page"] for row in rows}
    assert all(0 < row["p50_ms"] <= row["p99_ms"] <= row["max_ms"] for row in rows)
    assert document["p50_ms"] <= document["p99_ms"] <= document["max_ms"] == max(row["max_ms"] for row in rows)
    assert rows[0]["entries"] > 200, "messages came meanwhile"


@pytest.mark.slow
def test_days_of_load_leave_memory_flat_and_nothing_that_was_needed_is_cut(tmp_path: Path) -> None:
    (run,) = _bench("growth", "--days", "5", "--day-seconds", "8", "--rate", "60", "--streams", "2")["runs"]
    assert (run["lost"], run["doubled"], run["out_of_order"], run["declared_losses"]) == (0, 0, 0, 0)
    kept = [row["sources"] for row in run["samples"] if row["day"] > 4]
    assert 0 < max(kept) < run["messages"] / 2, "a day and a half of five, and a part of a node"


@pytest.mark.slow
def test_a_system_that_has_nothing_to_do_asks_redis_rarely(tmp_path: Path) -> None:
    """Where Redis is billed by command, that is what it costs. Two masters and two consumers, counted for long enough
    that what they do every ten or fifteen seconds counts as often as it should."""
    (run,) = _bench("idle", "--seconds", "30")["runs"]
    assert run["commands_per_second"] <= 7.0, run["commands"]
