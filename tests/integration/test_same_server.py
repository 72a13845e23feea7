"""SameServer: what a connection shows of the server's past."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.topologies import Server, until
from usher.common.base.errors import NotNow, ServerChanged
from usher.common.redis.client import Link, SameServer


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[Server]]:
    made = [Server(tmp_path, name) for name in ("first", "second")]
    try:
        for server in made:
            server.start()
        yield made
    finally:
        for server in made:
            server.close()


def _follow(replica: Server, master: Server) -> None:
    replica.ask("REPLICAOF", "127.0.0.1", master.port)
    until(lambda: replica.info("replication").get("master_link_status") == "up", "the replica follows")


def _lead(server: Server) -> None:
    server.ask("REPLICAOF", "NO", "ONE")


def test_a_server_that_was_a_replica_for_a_moment_is_another_one(servers: list[Server]) -> None:
    """It is the same process, and has lost what the other one had not got: what was acknowledged there is pending again
    for a consumer that has done with it, and that keeps its lease."""
    first, second = servers
    _follow(second, first)
    told: list[str] = []
    link = Link(first.url, "test", same_server=SameServer(told.append))
    link.call("SET", "owner", "c1:1")
    until(lambda: second.ask("GET", "owner") == b"c1:1", "the replica has it")
    _lead(second)
    link.call("SET", "owner", "nobody")
    _follow(first, second)
    link.close()
    with pytest.raises(NotNow, match="replica"):
        link.call("GET", "owner")
    _lead(first)
    assert first.ask("GET", "owner") == b"c1:1"
    assert told == []
    with pytest.raises(ServerChanged):
        link.call("GET", "owner")
    assert len(told) == 1
    link = Link(first.url, "test", same_server=SameServer(told.append))
    link.call("SET", "owner", "c2:1")
    link.close()
    _follow(first, second)  # once more, and the other one has not written a word since
    _lead(first)
    with pytest.raises(ServerChanged):
        link.call("GET", "owner")
    link.close()


def test_a_master_that_gets_its_first_replica_or_was_promoted_before_is_the_same(servers: list[Server]) -> None:
    first, second = servers
    _follow(second, first)
    _lead(second)
    told: list[str] = []
    for server, replica in ((second, None), (first, second)):
        same = SameServer(told.append)
        links = [Link(server.url, "test", same_server=same) for _ in range(2)]
        for link in links:
            assert link.call("PING") == b"PONG"
            if replica is not None:
                _follow(replica, server)
        for link in links:
            link.close()
            assert link.call("PING") == b"PONG"
            link.close()
    assert told == []
