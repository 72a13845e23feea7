"""``rediss+sentinel://`` and ``rediss+cluster://``: sentinels, masters and nodes over TLS, and only with a certificate
that is trusted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.tls_front import Papers, TlsFront
from tests.topologies import PASSWORD, SENTINEL_PASSWORD, SERVICE, Cluster, Server, until
from usher.common.base.errors import SettingsError, StartRefused
from usher.common.doctor.collector import collect
from usher.common.protocol.keys import Keys
from usher.common.redis.client import Link, check_reachable
from usher.common.redis.endpoints import near

STREAM = "ticket_stream"


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    return Papers(tmp_path_factory.mktemp("papers"))


@pytest.fixture(scope="module")
def sentinel(tmp_path_factory: pytest.TempPathFactory, papers: Papers) -> Iterator[tuple[str, list[TlsFront]]]:
    """URL without options, and what stands in front of the sentinel and of the master that it names."""
    folder = tmp_path_factory.mktemp("sentinel")
    with ExitStack() as stack:
        server = Server(folder, "master")
        stack.callback(server.close)
        server.start()
        front = TlsFront(papers, server.port, plain_too=True)
        stack.callback(front.close)
        watch = (f"sentinel monitor {SERVICE} 127.0.0.1 {front.port} 1", f"sentinel auth-pass {SERVICE} {PASSWORD}")
        watcher = Server(folder, "sentinel", *watch, sentinel=True)
        stack.callback(watcher.close)
        watcher.start()
        before = TlsFront(papers, watcher.port)
        stack.callback(before.close)
        yield (
            f"rediss+sentinel://:{PASSWORD}@127.0.0.1:{before.port}/{SERVICE}?sentinel_password={SENTINEL_PASSWORD}",
            [before, front],
        )


class FrontedCluster(Cluster):
    """Every node names the TLS port in front of it."""

    def __init__(self, folder: Path, papers: Papers) -> None:
        super().__init__(folder)
        self._papers = papers
        self.fronts: list[TlsFront] = []

    def add(self, name: str, *settings: str, sentinel: bool = False) -> Server:
        front = TlsFront(self._papers, 0)
        self.fronts.append(front)
        server = super().add(name, *settings, f"cluster-announce-port {front.port}", sentinel=sentinel)
        front.behind = server.port
        return server

    def _is_ready(self, server: Server) -> bool:
        owners = {slots[2][1] for slots in server.link.call("CLUSTER", "SLOTS")}
        return "cluster_state:ok" in server.link.call("CLUSTER", "INFO").decode() and owners == {
            front.port for front in self.fronts
        }

    def close(self) -> None:
        super().close()
        for front in self.fronts:
            front.close()

    @property
    def url(self) -> str:
        return f"rediss+cluster://:{PASSWORD}@" + ",".join(f"127.0.0.1:{front.port}" for front in self.fronts)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, papers: Papers) -> Iterator[FrontedCluster]:
    with FrontedCluster(tmp_path_factory.mktemp("cluster"), papers) as made:
        yield made


def works(url: str, kind: str) -> None:
    """A command, a pipeline, a script, and what the doctor makes of it."""
    check_reachable(url)
    link, keys = Link(url, "test:far"), Keys(STREAM, "g")
    until(lambda: link.call("PING") == b"PONG", "PONG over TLS")
    assert link.pipeline([("DEL", keys.stream), ("XADD", keys.stream, "1-1", "ticket_id", "T")]) == [0, b"1-1"]
    assert link.call("CLIENT", "GETNAME") == b"test:far"
    assert link.run("find_entries", (keys.stream,), ("XRANGE", "-", "+", 10, "")) == [1, b"1-1", [], 1]
    assert collect(link, keys, 10_000).mode == kind
    link.call("DEL", keys.stream)
    link.close()


def test_the_master_that_sentinel_names_is_reached_over_tls(
    sentinel: tuple[str, list[TlsFront]], papers: Papers
) -> None:
    url, fronts = sentinel
    works(f"{url}&ssl_ca_certs={papers.ca}", "sentinel")
    assert all(front.served > 0 for front in fronts), "the sentinel and the master"


def test_the_node_of_a_stream_is_reached_over_tls(cluster: FrontedCluster, papers: Papers) -> None:
    works(near(f"{cluster.url}?ssl_ca_certs={papers.ca}", STREAM), "cluster")
    for stream in ("orders", "tenant{7}", "a", "b"):
        link = Link(near(f"{cluster.url}?ssl_ca_certs={papers.ca}", stream), "test")
        assert link.call("SET", Keys(stream, "g").tickets, "v") == b"OK"
        link.close()
    assert not any(front.refused for front in cluster.fronts)


Change = Callable[[str, Papers], str]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda url, papers: url, "certificate verify failed"),
        (lambda url, papers: url + "ssl_ca_certs=/nowhere/ca.pem", "cannot be reached"),
        (lambda url, papers: url.replace("rediss", "redis"), "USHER_REDIS_URL"),
    ],
    ids=["a CA that nobody trusts", "a file that is not there", "no TLS"],
)
@pytest.mark.parametrize("kind", ["sentinel", "cluster"])
def test_what_is_wrong_is_told_at_the_start_without_any_password(
    request: pytest.FixtureRequest, papers: Papers, kind: str, change: Change, told: str
) -> None:
    found = request.getfixturevalue(kind)
    url = change(f"{found[0]}&" if kind == "sentinel" else f"{found.url}?", papers)
    with pytest.raises((StartRefused, SettingsError), match=told) as refused:
        check_reachable(near(url, STREAM))
    assert PASSWORD not in str(refused.value)
