"""The services of outbox and trimming keep the contract of start and stop."""

from __future__ import annotations

from tests.abuse import check_contract
from tests.outboxes import STREAM, Outbox
from usher.common.outbox.store import OutboxStore
from usher.common.protocol.keys import Keys, LogKeys
from usher.common.redis.client import Link
from usher.master.assembly.program import MasterProgram
from usher.master.leader.elector import Lead
from usher.master.operations.trimming import Trimmer
from usher.master.policy.trim import Retention
from usher.master.settings import MasterSettings, StreamerSettings
from usher.master.streamer.program import Streamer


def _lead() -> Lead:
    lead = Lead()
    lead._set(1, "http://one")
    return lead


def _streamer(url: str, redis_url: str) -> Streamer:
    return Streamer(Link(redis_url, "test"), LogKeys(STREAM), _lead(), OutboxStore(url), StreamerSettings())


def test_the_streamer(sqlite_outbox: Outbox, redis_url: str) -> None:
    check_contract(lambda: _streamer(sqlite_outbox.url, redis_url))


def test_the_trimmer(redis_url: str) -> None:
    check_contract(
        lambda: Trimmer(Link(redis_url, "test"), lambda: [STREAM.encode()], 0.01, Retention(), Keys(STREAM, "g"))
    )


def test_a_master_trims_only_when_it_is_told_to(redis_url: str) -> None:
    def trimmers(**given: str) -> int:
        return sum(
            isinstance(service, Trimmer) for service in MasterProgram(MasterSettings(**given), redis_url)._services
        )  # type: ignore[arg-type]

    assert (trimmers(trim_keep="forever"), trimmers()) == (1, 1)
