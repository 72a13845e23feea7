"""Three days at default settings in seconds: memory stays flat, and nothing that a reader needs is cut.

Simulated: a message a second with the ids of those days, as a thousandth of 1,000 messages per second; the clock that the
trimmer is told, in steps of ten minutes; and how far the readers are. Real: Redis and its memory, the trimmer with a
master's default settings, its script. The figures: `-o log_cli=true --log-cli-level=INFO`.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest

from usher.common.doctor.collector import look_at_memory, read_growth
from usher.common.doctor.judgements import MemoryUse, describe
from usher.common.protocol.keys import Keys, LogKeys
from usher.common.protocol.stream_id import ZERO, rank
from usher.common.redis.client import Link
from usher.common.redis.replies import TicketStream, cut_unread, pairs, redis_ms, span_of
from usher.master.operations import trimming
from usher.master.operations.trimming import Trimmer, retention_of
from usher.master.settings import MasterSettings

log = logging.getLogger(__name__)
STREAM = "growing"
KEYS, LOG_KEYS = Keys(STREAM, "g"), LogKeys(STREAM)
HOUR, STEP_S = 3600, 600
_BODY = "x" * 60
_FILL = """for n = 0, ARGV[2] - 1 do
  redis.call('XADD', KEYS[1], string.format('%.0f-0', ARGV[1] + 1000 * n), 'ticket_id', n % 97, 'text', ARGV[3])
end"""


class World:
    """The stream and its readers at second ``now`` of the simulation; ``began_ms`` is its first second."""

    def __init__(self, link: Link, began_ms: int) -> None:
        self.link, self.began_ms, self.now = link, began_ms, 0
        self.sizes: dict[int, int] = {}
        for group in ("g", "slow"):
            TicketStream(link, Keys(STREAM, group)).create_group(ZERO)
        self._counts = b"lag" in link.call("XINFO", "GROUPS", STREAM)[0]

    def id_at(self, second: int) -> bytes:
        return b"%d-0" % (self.began_ms + 1000 * max(0, second))

    def send(self) -> None:
        self.link.call("EVAL", _FILL, 1, STREAM, self.began_ms + 1000 * self.now, STEP_S, _BODY)
        self.now += STEP_S

    def read(self) -> list[bytes]:
        """Have each reader go on as far as it is by now. Return what each of them needs."""
        hour = self.now / HOUR
        needs = [self.id_at(self.now - 2)]
        self._set("g", self.now - 2)
        # For 26 hours a ticket is halted, and a group is ill for a day and a half; then both are well.
        if 5 <= hour < 31:
            self.link.call("XCLAIM", STREAM, "g", "halted", 0, self.id_at(5 * HOUR - 60), "FORCE", "JUSTID")
            needs.append(self.id_at(5 * HOUR - 60))
        else:
            self.link.call("XACK", STREAM, "g", self.id_at(5 * HOUR - 60))
        slow = self.now - 30 if not 8 <= hour < 44 else 8 * HOUR
        self._set("slow", slow)
        checkpoint = self.now - 2 * HOUR
        self.link.call("HSET", LOG_KEYS.checkpoints, "totals", b"1 %b 0" % self.id_at(checkpoint))
        self.link.call("HSET", LOG_KEYS.groups, "g", min(needs, key=rank), "slow", self.id_at(slow))
        self.link.call("SET", LOG_KEYS.archived, self.id_at(self.now - 6 * HOUR))
        return [*needs, self.id_at(slow), self.id_at(checkpoint)]

    def _set(self, group: str, second: int) -> None:
        read = ("ENTRIESREAD", max(0, second) + 1) if self._counts else ()
        self.link.call("XGROUP", "SETID", STREAM, group, self.id_at(second), *read)

    def check(self, needs: list[bytes]) -> None:
        span = span_of(self.link, STREAM)
        assert span is not None and span.first is not None
        assert rank(span.first) <= min(map(rank, needs)), f"hour {self.now / HOUR}: {span.first!r} is the first"
        first_s = (rank(span.first) >> 64) - self.began_ms
        assert self.link.call("XLEN", STREAM) == self.now - first_s // 1000, "only a beginning was cut"
        of_stream = pairs(self.link.call("XINFO", "STREAM", STREAM))
        for group in ("g", "slow"):
            facts = TicketStream(self.link, Keys(STREAM, group)).group_facts()
            assert cut_unread(facts, of_stream, None) == 0, "our own cut is never taken for one of unread entries"


def test_a_day_of_load_leaves_memory_flat_and_what_is_needed_there(
    redis_url: str, link: Link, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    world = World(link, redis_ms(link) - 90 * HOUR * 1000)
    limit: list[int] = []

    def simulated(told: Link) -> tuple[int, MemoryUse | None]:
        memory = look_at_memory(told)[1]
        assert memory is not None
        return world.began_ms + 1000 * world.now, memory._replace(limit=(limit or [memory.limit])[0])

    monkeypatch.setattr(trimming, "look_at_memory", simulated)
    settings = MasterSettings(ticket_stream=STREAM, group="g")
    ours = Link(redis_url, "test:trim"), lambda: [STREAM.encode()]
    trimmer = Trimmer(*ours, 10.0, retention_of(settings, work_stream=False), KEYS)
    held_back: dict[Any, str] = {}

    def live_until(hour: int) -> None:
        while world.now < hour * HOUR:
            world.send()
            needs = world.read()
            trimmer.run_once()
            world.check(needs)
            held_back[world.now // HOUR] = (link.call("HGET", KEYS.position, "trim_held_back") or b"").decode()
            world.sizes[world.now // HOUR] = simulated(link)[1].used  # type: ignore[union-attr]

    live_until(72)
    grows = read_growth(link, STREAM, link.call("XLEN", STREAM), span_of(link, STREAM), *simulated(link))
    assert grows is not None and 0.98 < grows.per_second < 1.02
    assert {name for name in held_back.values() if name} == {
        f"group slow has read up to here ({world.id_at(8 * HOUR).decode()})",
        f"group g has this entry pending ({world.id_at(5 * HOUR - 60).decode()})",
    }
    day = world.sizes[71] - world.sizes[0]
    log.info("%s; KiB used by hour: %s", describe(grows), {hour: size >> 10 for hour, size in world.sizes.items()})
    assert world.sizes[43] - world.sizes[0] > 1.4 * day, "what the slow group needed was there"
    assert (
        max(world.sizes[hour] for hour in range(46, 72)) - min(world.sizes[hour] for hour in range(46, 72)) < day / 10
    )
    limit.append(2 * (world.sizes[71] - day // 2))  # from now on memory is scarce
    assert not _gave_way(caplog)
    live_until(84)
    assert len(_gave_way(caplog)) == 1, "at once, and then each hour of the clock on the wall"
    assert max(world.sizes[hour] for hour in range(73, 84)) < limit[0] / 2 + day / 20
    assert link.call("XLEN", STREAM) > 2 * HOUR, "no more goes than must"
    assert link.call("XRANGE", STREAM, "-", "+", "COUNT", 1)[0][0] > ZERO
    trimmer.on_end()


def _gave_way(caplog: pytest.LogCaptureFixture) -> list[Any]:
    """The lines that tell that younger entries were cut than USHER_TRIM_KEEP says."""
    told = [record for record in caplog.records if record.getMessage() == "stream_trimmed"]
    return [record for record in told if vars(record)["facts"]["gives_way"]]
