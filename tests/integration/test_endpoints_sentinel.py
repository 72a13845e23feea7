"""``redis+sentinel://``: a Link finds the master that the sentinels name, also after a failover."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.routers import add, running, taken
from tests.proxy import Proxy
from tests.topologies import PASSWORD, SENTINEL_PASSWORD, SERVICE, UnderSentinel, figures, keep_trying, until
from usher.common.base.errors import NotNow, RedisTrouble, ReplyUnknown, SettingsError, StartRefused
from usher.common.doctor.collector import collect, startup_findings
from usher.common.doctor.judgements import DoctorSeverity, examine
from usher.common.protocol.keys import Keys
from usher.common.redis import endpoints
from usher.common.redis.client import Link, check_reachable
from usher.common.redis.embedded import free_port
from usher.common.redis.tracking import ChangeEar
from usher.common.router.router import Mode

#: Sentinel calls the master down after 1 s, agrees, elects, promotes: 2.3 s on a quiet machine.
_FAILOVER_WITHIN_S = 15.0


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UnderSentinel]:
    """One whose roles no test changes."""
    with UnderSentinel(tmp_path_factory.mktemp("calm")) as made:
        yield made


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[UnderSentinel]:
    with UnderSentinel(tmp_path) as made:
        yield made


def test_a_link_works_with_the_master_and_says_who_it_is(calm: UnderSentinel) -> None:
    link = Link(calm.url, "test:far")
    assert link.call("SET", "k", "v") == b"OK"
    assert calm.first.ask("GET", "k") == b"v"
    assert link.call("CLIENT", "GETNAME") == b"test:far"
    assert link.run("find_entries", ("s",), ("XRANGE", "-", "+", 10, "")) == [0, b"", [], 1]
    link.close()
    check_reachable(calm.url)


def test_a_database_may_be_chosen(calm: UnderSentinel) -> None:
    link = Link(calm.url.replace(f"/{SERVICE}", f"/{SERVICE}/3"), "test")
    link.call("SET", "k", "v")
    assert calm.first.info("keyspace")["db3"].startswith("keys=1,")
    link.close()


def test_the_doctor_sees_replica_and_sentinels(calm: UnderSentinel) -> None:
    for url, severity, replicas in (
        (calm.url, DoctorSeverity.OK, DoctorSeverity.WARN),
        (
            calm.first.url,
            DoctorSeverity.WARN,
            DoctorSeverity.WARN,
        ),  # sentinels watch it, but the URL would stay with it after a failover
    ):
        link = Link(url, "test")
        found = {finding.check: finding for finding in examine(collect(link, Keys("ticket_stream", "g"), 10_000))}
        link.close()
        assert (found["failover"].severity, found["replicas"].severity) == (severity, replicas)
    link = Link(calm.second.url, "test")
    assert [
        finding.check for finding in startup_findings(link, Keys("ticket_stream", "g")) if finding.check == "role"
    ] == ["role"]
    link.close()


def test_a_sentinel_that_is_down_is_passed_over_at_once_and_one_that_is_silent_soon(calm: UnderSentinel) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hosts = [f"127.0.0.1:{free_port()}", f"127.0.0.1:{silent.getsockname()[1]}", calm.sentinels[2].address]
        link = Link(
            f"redis+sentinel://:{PASSWORD}@{','.join(hosts)}/{SERVICE}?sentinel_password={SENTINEL_PASSWORD}", "test"
        )
        began = time.monotonic()
        assert link.call("PING") == b"PONG"
        assert time.monotonic() - began < 3, (
            "one second for the silent one; redis-py's own retries would take 4 s for the one that is down"
        )
        link.close()


def test_a_sentinel_that_is_cut_off_with_a_deposed_master_is_not_believed_for_ever(
    calm: UnderSentinel, tmp_path: Path
) -> None:
    """It knows nothing better, and the deposed one refuses every write (min-replicas-to-write): everything stood still,
    while the other sentinels named the master. From then on another one is asked first, also by the other links: those
    of a consumer must not go to two servers."""
    with UnderSentinel(tmp_path) as cut_off:
        cut_off.first.ask("CONFIG", "SET", "min-replicas-to-write", 2)
        url = calm.url.replace("@", f"@{cut_off.sentinels[0].address},")
        link, other = Link(url, "test"), Link(url, "test:other")
        assert keep_trying(link, "SET", "k", "there", within_s=5) == b"OK"
        assert calm.first.ask("GET", "k") == b"there"
        assert other.call("SET", "k", "there too") == b"OK"
        link.close()
        other.close()


@pytest.mark.slow
def test_a_sentinel_that_names_a_master_of_before_a_failover_is_not_asked_back(
    calm: UnderSentinel, tmp_path: Path
) -> None:
    """Trouble of a moment sent all links of a process to the deposed master that a cut off sentinel names, and it takes
    all that will be lost."""
    with UnderSentinel(tmp_path) as later:
        later.fail_over()
        until(lambda: later.first.role() == "slave", "the former master is demoted", within_s=30)
        hosts = (later.sentinels[0].address, calm.sentinels[0].address, later.sentinels[1].address)
        link = Link(
            f"redis+sentinel://:{PASSWORD}@{','.join(hosts)}/{SERVICE}?sentinel_password={SENTINEL_PASSWORD}", "test"
        )
        assert link.call("SET", "k", "1") == b"OK"
        later.second.ask("CONFIG", "SET", "min-replicas-to-write", 2)
        with pytest.raises(NotNow):
            link.call("SET", "k", "2")
        later.second.ask("CONFIG", "SET", "min-replicas-to-write", 0)
        assert link.call("SET", "k", "3") == b"OK"
        assert later.second.ask("GET", "k") == b"3"
        link.close()
        later.close()
        assert keep_trying(link, "GET", "k2") is None, (
            "if nobody else is there it is believed: sentinels may have been set up anew"
        )
        link.close()


def test_the_address_of_a_former_master_at_which_another_server_is_by_now_is_not_believed_for_ever(
    calm: UnderSentinel, tmp_path: Path
) -> None:
    """It refuses our password, at every try."""
    with UnderSentinel(tmp_path) as cut_off:
        url = calm.url.replace("@", f"@{cut_off.sentinels[0].address},")
        cut_off.first.link.call("CONFIG", "SET", "requirepass", "of-another")
        link = Link(url, "test")
        with pytest.raises(NotNow) as refused:
            link.call("PING")
        assert refused.value.kind == "AUTH"
        assert link.call("PING") == b"PONG"
        link.close()


def test_without_any_sentinel_it_is_not_now() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hosts = f"127.0.0.1:{free_port()},127.0.0.1:{silent.getsockname()[1]}"
        link = Link(f"redis+sentinel://{hosts}/{SERVICE}", "test", timeout_s=0.3)
        with pytest.raises(NotNow) as refused:
            link.call("PING")
        assert refused.value.kind == "CONNECT"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda url: url.replace(f"/{SERVICE}", "/nobody"), "nobody"),
        (lambda url: url.replace(PASSWORD, "wrong-one"), "refuses the password"),
        (lambda url: url.replace(SENTINEL_PASSWORD, "wrong-one"), "cannot be reached"),
        (lambda url: url.replace(f"/{SERVICE}", "/"), "service is missing"),
        (lambda url: url.replace(f"/{SERVICE}", f"/{SERVICE}/zero"), "must be a number"),
        (lambda url: url.replace(f"/{SERVICE}", f",127.0.0.1/{SERVICE}"), "must be host:port"),
    ],
    ids=[
        "an unknown service", "a wrong password", "a wrong password of the sentinels", "no service", "no database",
        "no port",
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_at_the_start_without_any_password(
    calm: UnderSentinel, change: Callable[[str], str], told: str
) -> None:
    with pytest.raises((StartRefused, SettingsError), match="USHER_REDIS_URL") as refused:
        check_reachable(change(calm.url))
    assert told in str(refused.value)
    for secret in (PASSWORD, SENTINEL_PASSWORD, "wrong-one"):
        assert secret not in str(refused.value)


def test_after_the_master_was_killed_the_promoted_replica_is_found(pair: UnderSentinel) -> None:
    link, waiting = Link(pair.url, "test"), Link(pair.url, "test:waits")
    link.call("XADD", "s", "1-1", "f", "v")
    assert link.call("WAIT", 1, 5000) == 1
    ends: list[RedisTrouble] = []

    def wait_for_news() -> None:
        try:
            waiting.call("XREAD", "BLOCK", 60_000, "STREAMS", "s", "1-1", block_s=60)
        except RedisTrouble as end:
            ends.append(end)

    reader = threading.Thread(target=wait_for_news)
    reader.start()
    until(lambda: pair.first.info("clients")["blocked_clients"] == "1", "somebody waits")
    began = time.monotonic()
    pair.first.kill()
    with pytest.raises(ReplyUnknown):
        link.call("XADD", "s", "2-1", "f", "v")
    with pytest.raises(NotNow):  # the sentinels still name the dead one
        link.call("XADD", "s", "2-1", "f", "v")
    assert keep_trying(link, "XADD", "s", "2-1", "f", "v", within_s=_FAILOVER_WITHIN_S) == b"2-1"
    figures(failover_s=time.monotonic() - began)
    assert pair.second.role() == "master"
    reader.join(5)
    assert [type(end) for end in ends] == [ReplyUnknown], "who was waiting has heard of it"
    assert [entry[0] for entry in waiting.call("XREAD", "STREAMS", "s", "0")[0][1]] == [b"1-1", b"2-1"]
    link.close()
    waiting.close()


def test_a_former_master_that_has_lost_its_replica_is_left_at_once(
    pair: UnderSentinel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For whoever does not hear the sentinels: until it is demoted it accepts writes that will be thrown away, unless
    ``min-replicas-to-write`` forbids it. Then whoever is connected to it looks again where the master is."""
    monkeypatch.setattr(endpoints, "listen", lambda *_: None)
    pair.first.ask("CONFIG", "SET", "min-replicas-to-write", 1)
    link = Link(pair.url, "test")
    assert link.call("SET", "k", "1") == b"OK"
    pair.fail_over()
    with pytest.raises(NotNow) as refused:
        link.call("SET", "k", "2")
    assert refused.value.kind == "NOREPLICAS"
    assert link.call("SET", "k", "3") == b"OK"
    assert (pair.first.role(), pair.second.ask("GET", "k")) == ("master", b"3")
    link.close()


def test_after_a_failover_on_purpose_every_link_goes_to_the_new_master_at_once(pair: UnderSentinel) -> None:
    """Sentinel demotes the former one only 10 s later. Nobody heard ``+switch-master``, and what it took until then was
    thrown away: 1,659 of 4,529 messages of a trial."""
    link, accepted = Link(pair.url, "test"), list[int]()
    assert keep_trying(link, "RPUSH", "k", -1) == 1

    def send() -> None:
        number, until_s = 0, time.monotonic() + 60
        while time.monotonic() < until_s and not over.is_set():
            with contextlib.suppress(RedisTrouble):
                link.call("RPUSH", "k", number)
                accepted.append(number)
            number += 1
            time.sleep(0.002)

    over = threading.Event()
    sender = threading.Thread(target=send)
    sender.start()
    began = time.monotonic()
    pair.fail_over()
    before = pair.second.ask("LLEN", "k")
    until(lambda: pair.second.ask("LLEN", "k") > before, "the sender is at the new master")
    over.set()
    sender.join()
    assert pair.first.role() == "master", "it was not demoted meanwhile"
    there = {int(number) for number in pair.second.ask("LRANGE", "k", 0, -1)}
    lost = [number for number in accepted if number not in there]
    figures(seconds=time.monotonic() - began, accepted=len(accepted), lost=len(lost))
    assert len(lost) <= len(accepted) // 4
    link.close()


def test_all_links_of_a_process_leave_a_former_master_with_the_first_one_that_hears_of_it(pair: UnderSentinel) -> None:
    """It lives, and takes writes for 10 s more. A master some of whose links stayed there registered consumers where
    nobody looked for them, and led elsewhere: nothing was handled until it was demoted."""
    stays, goes = Link(pair.url, "test:stays"), Link(pair.url, "test:goes")
    for link in (stays, goes):
        assert link.call("SET", "k", "1") == b"OK"
    pair.fail_over()
    goes.close()  # as after a time-out
    assert goes.call("SET", "k", "2") == b"OK"
    with pytest.raises(NotNow) as refused:  # what it knows is of the other server
        stays.call("SET", "k", "3")
    assert refused.value.kind == "CONNECT"
    assert stays.call("SET", "k", "4") == b"OK"
    assert (pair.first.role(), pair.first.ask("GET", "k"), pair.second.ask("GET", "k")) == ("master", b"1", b"4")
    stays.close()
    goes.close()


def test_who_hears_of_changes_leaves_a_former_master_with_the_others(pair: UnderSentinel) -> None:
    """There nothing changes, it answers every PING, and the sources of the other one were found by the next scan
    only."""
    ear, goes, stream = (ChangeEar(pair.url, "test:ear", [b"s"]), Link(pair.url, "test:goes"), "s:1")
    with running(pair.url, Mode.CHANGE_DRIVEN) as router:
        subscription = router.subscribe(stream)
        add(goes, stream, "1-1")
        assert taken(subscription, 1) == [b"1-1"]
        assert ear.listen() is None, "it has connected"
        pair.fail_over()
        goes.close()  # as after a time-out
        add(goes, stream, "2-1")
        assert taken(subscription, 1) == [b"2-1"]
        assert ear.listen() is None
        assert pair.first.role() == "master", "it was not demoted meanwhile"
    ear.on_end()
    goes.close()


def test_connections_that_stayed_at_a_demoted_master_hear_readonly_once_and_move(pair: UnderSentinel) -> None:
    """Also behind a fixed address, which a load balancer, a virtual IP or DNS points at the master of the day."""
    with Proxy(pair.first.url) as proxy:
        named, fixed = Link(pair.url, "test:named"), Link(proxy.url, "test:fixed")
        for link in (named, fixed):
            assert link.call("SET", "k", "1") == b"OK"
        pair.swap_by_hand()
        proxy.lead_to(pair.second.url)
        for link in (named, fixed):
            with pytest.raises(NotNow) as refused:
                link.call("SET", "k", "2")
            assert refused.value.kind == "READONLY"
            assert link.call("SET", link.url, "3") == b"OK"
            assert pair.second.ask("GET", link.url) == b"3"
            link.close()
