"""Link against a real server: what it says about commands that did not happen, or may have."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.integration.factories import spent
from tests.integration.routers import until
from tests.proxy import Proxy
from usher.common.base.errors import GroupMissing, NotNow, RedisTrouble, ReplyUnknown, StartRefused
from usher.common.redis.client import ELSEWHERE, CommandRefused, Link, ScriptMissing, check_reachable, named
from usher.common.redis.embedded import EmbeddedRedis, free_port

_PATIENCE_S = 10.0


@pytest.fixture
def own_server(tmp_path_short: Path) -> Iterator[EmbeddedRedis]:
    """A server of the test's own, to be reconfigured and killed."""
    with EmbeddedRedis(tmp_path_short, port=None, durable=False) as server:
        yield server


@pytest.fixture
def own_link(own_server: EmbeddedRedis) -> Iterator[Link]:
    link = Link(own_server.url, "test")
    yield link
    link.close()


def test_a_connection_says_its_name_and_no_more(link: Link, redis_url: str) -> None:
    asked = spent(link, lambda: Link(redis_url, "test:new").call("PING"))
    assert sum(count for name, count in asked.items() if name.startswith("client")) == 1


def test_any_bytes_go_in_and_come_out(link: Link) -> None:
    everything = bytes(range(256))
    assert link.call("SET", everything, everything) == b"OK"
    assert link.call("GET", everything) == everything
    assert link.call("XADD", "s", "1-1", "f", everything) == b"1-1"
    assert link.call("XRANGE", "s", "-", "+") == [[b"1-1", [b"f", everything]]]


def test_a_lost_reply_is_unknown_and_the_command_is_not_repeated(redis_url: str, link: Link) -> None:
    with Proxy(redis_url) as proxy:
        far = Link(proxy.url, "far")
        assert far.call("PING") == b"PONG"
        proxy.on_reply = lambda chunk: None
        with pytest.raises(ReplyUnknown):
            far.call("XADD", "s", "*", "f", "v")
        assert link.call("XLEN", "s") == 1, "Redis had it, once"
        proxy.on_reply = lambda chunk: chunk
        assert far.call("XLEN", "s") == 1, "the next call makes a new connection"
        far.close()


def test_a_transaction_happens_whole_or_not_at_all(redis_url: str, link: Link) -> None:
    other, after = Link(redis_url, "other"), [("WATCH", "key"), ("GET", "key")]
    assert link.all_of(after) == [b"OK", None]
    assert link.transaction(link.connections, [("SET", "key", 1), ("INCR", "n")], after) == ([b"OK", 1], [b"OK", b"1"])
    other.call("SET", "key", 2)
    assert link.transaction(link.connections, [("INCR", "n")], after) == (None, [b"OK", b"2"])
    done, _ = link.transaction(link.connections, [("LPUSH", "n", 1), ("INCR", "n")], after)
    assert done is not None and isinstance(done[0], CommandRefused) and done[1] == 2
    with pytest.raises(CommandRefused, match="unknown command"):
        link.transaction(link.connections, [("INCR", "n"), ("NONSENSE",)], after)
    assert (link.call("GET", "n"), link.connections) == (b"2", 1)
    other.close()


def test_what_a_signals_handler_raises_between_a_command_and_its_reply_leaves_none_for_the_next_call(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A time limit of a task queue, for one: all answers were those of the call before, from then on."""

    def interrupted(_block_s: float) -> None:
        monkeypatch.undo()
        raise TimeoutError

    for send in (lambda: link.call("ECHO", "first"), lambda: link.pipeline([("ECHO", "first"), ("ECHO", "second")])):
        monkeypatch.setattr(link, "_receive", interrupted)
        with pytest.raises(TimeoutError):
            send()
        assert link.call("ECHO", "next") == b"next"


def test_a_connection_that_cannot_be_made_means_that_nothing_happened() -> None:
    link = Link(f"redis://:secret@127.0.0.1:{free_port()}", "test")
    with pytest.raises(NotNow) as refused:
        link.call("PING")
    assert refused.value.kind == "CONNECT"
    assert "secret" not in str(refused.value)


def test_a_server_that_never_answers_is_given_up_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        link = Link(f"redis://127.0.0.1:{silent.getsockname()[1]}", "test", timeout_s=0.2)
        began = time.monotonic()
        with pytest.raises(RedisTrouble):
            link.call("PING")
        assert time.monotonic() - began < 5
        link.close()


def test_a_wrong_password_is_refused_each_time_and_not_told(redis_url: str) -> None:
    link = Link(redis_url.replace("://:", "://:wrong"), "test")
    for _ in range(2):
        with pytest.raises(NotNow) as refused:
            link.call("PING")
        assert refused.value.kind == "AUTH"
        assert "wrong" not in str(refused.value).replace("WRONGPASS", "")


def test_a_blocking_command_may_take_longer_than_a_reply(redis_url: str) -> None:
    with Link(redis_url, "test", timeout_s=0.3) as link:
        assert link.call("XREAD", "BLOCK", 600, "STREAMS", "nothing", "$", block_s=0.6) is None
        assert link.call("PING") == b"PONG"


def test_a_blocked_call_can_be_ended_from_another_thread(redis_url: str, link: Link) -> None:
    blocked = Link(redis_url, "blocked")
    blocked.call("PING")
    ends: list[BaseException] = []

    def read() -> None:
        try:
            blocked.call("XREAD", "BLOCK", 60_000, "STREAMS", "nothing", "$", block_s=60)
        except RedisTrouble as end:
            ends.append(end)

    reader = threading.Thread(target=read)
    reader.start()
    until(lambda: b"name=blocked" in (clients := link.call("CLIENT", "LIST")) and b"cmd=xread" in clients)
    blocked.interrupt()
    reader.join(_PATIENCE_S)
    assert not reader.is_alive()
    assert [type(end) for end in ends] == [ReplyUnknown]
    assert blocked.call("PING") == b"PONG"
    blocked.close()


def test_an_answer_that_trying_again_will_not_mend(link: Link) -> None:
    link.call("SET", "k", "v")
    for command in (
        ("LPUSH", "k", "v"),
        ("NOPE",),
        ("EVAL", "error('boom')", 0),
        ("EVAL", "return redis.call('LPUSH', 'k', 'v')", 0),
    ):
        with pytest.raises(CommandRefused):
            link.call(*command)
    assert link.call("GET", "k") == b"v", "the connection goes on"


def test_a_missing_group_and_a_missing_script_have_names(link: Link) -> None:
    with pytest.raises(GroupMissing):
        link.call("XREADGROUP", "GROUP", "g", "c", "STREAMS", "s", ">")
    with pytest.raises(GroupMissing):
        link.call("EVAL", "return redis.call('XREADGROUP', 'GROUP', 'g', 'c', 'STREAMS', 's', '>')", 0)
    with pytest.raises(ScriptMissing):
        link.call("EVALSHA", "0" * 40, 0)


@pytest.mark.parametrize(
    ("kind", "setup", "command"),
    [
        ("OOM", [("CONFIG", "SET", "maxmemory", "1")], "SET"),
        ("NOREPLICAS", [("CONFIG", "SET", "min-replicas-to-write", "1")], "SET"),
        ("READONLY", [("REPLICAOF", "127.0.0.1", "1")], "SET"),
        ("MASTERDOWN", [("CONFIG", "SET", "replica-serve-stale-data", "no"), ("REPLICAOF", "127.0.0.1", "1")], "GET"),
    ],
)
@pytest.mark.parametrize("in_script", [False, True], ids=["bare", "in a script"])
def test_a_refusal_for_the_moment_is_not_now(
    kind: str, setup: list[tuple[str, ...]], command: str, in_script: bool, own_link: Link
) -> None:
    for step in setup:
        own_link.call(*step)
    arguments = (command, "k", "v") if command == "SET" else (command, "k")
    quoted = ", ".join(f"'{argument}'" for argument in arguments)
    with pytest.raises(NotNow) as refused:
        own_link.call(*(("EVAL", f"return redis.call({quoted})", 0) if in_script else arguments))
    assert refused.value.kind == kind


def test_a_server_that_runs_an_endless_script_is_busy(own_server: EmbeddedRedis, own_link: Link) -> None:
    own_link.call("CONFIG", "SET", "lua-time-limit", "10")

    def spin() -> None:
        with (
            Link(own_server.url, "spinning", timeout_s=30) as spinning,
            pytest.raises(CommandRefused, match="killed by user"),
        ):
            spinning.call("EVAL", "while true do end", 0)

    spinner = threading.Thread(target=spin)
    spinner.start()
    try:
        with pytest.raises(NotNow) as refused:
            for _ in range(1000):
                own_link.call("PING")
                time.sleep(0.01)
        assert refused.value.kind == "BUSY"
    finally:
        own_link.call("SCRIPT", "KILL")
        spinner.join(_PATIENCE_S)


def test_a_server_that_loads_its_data_is_not_now_also_in_a_pipeline(redis_url: str) -> None:
    """redis-py takes LOADING for a broken connection; here it is an answer like any other: the command did not
    happen."""
    loading = b"-LOADING Redis is loading the dataset in memory\r\n"
    with Proxy(redis_url) as proxy:
        link = Link(proxy.url, "test")
        link.call("PING")
        proxy.on_reply = lambda chunk: loading
        with pytest.raises(NotNow) as refused:
            link.call("SET", "k", "v")
        assert refused.value.kind == "LOADING"
        proxy.on_reply = lambda chunk: loading + b"+PONG\r\n" + loading
        replies = link.pipeline([("SET", "k", "v"), ("PING",), ("SET", "k", "v")])
        assert [getattr(reply, "kind", reply) for reply in replies] == ["LOADING", b"PONG", "LOADING"]
        proxy.on_reply = lambda chunk: chunk
        assert link.call("PING") == b"PONG", "the connection goes on"
        proxy.on_reply = lambda chunk: loading if b"redis_version" in chunk else chunk
        check_reachable(proxy.url)
        link.close()


def test_a_refusal_for_lack_of_rights_begins_with_its_word(redis_url: str, link: Link) -> None:
    link.call("ACL", "SETUSER", "limited", "reset", "on", ">pw", "~*", "+client|setname", "+@connection")
    limited = Link(
        redis_url.replace("://:", "://limited:").replace(redis_url.split(":")[2].split("@")[0], "pw"), "test"
    )
    with pytest.raises(CommandRefused, match=r"^Redis: NOPERM "):
        limited.call("GET", "k")
    limited.close()
    link.call("ACL", "DELUSER", "limited")


def test_a_pipeline_has_errors_in_their_place(link: Link) -> None:
    assert link.pipeline([]) == []
    replies = link.pipeline(
        [("SET", "k", "1"), ("LPUSH", "k", "x"), ("GET", "k"), ("XREADGROUP", "GROUP", "g", "c", "STREAMS", "s", ">")]
    )
    assert replies[0] == b"OK"
    assert isinstance(replies[1], CommandRefused)
    assert replies[2] == b"1"
    assert isinstance(replies[3], GroupMissing)


def test_a_pipeline_whose_replies_are_lost_is_unknown(redis_url: str, link: Link) -> None:
    with Proxy(redis_url) as proxy:
        far = Link(proxy.url, "far")
        far.call("PING")
        proxy.on_reply = lambda chunk: None
        with pytest.raises(ReplyUnknown):
            far.pipeline([("XADD", "s", "*", "f", "v"), ("XADD", "s", "*", "f", "v")])
        far.close()
    assert link.call("XLEN", "s") == 2


def test_a_restarted_server_is_found_again(own_server: EmbeddedRedis, own_link: Link) -> None:
    own_link.call("PING")
    own_server.stop()
    with pytest.raises(RedisTrouble):
        own_link.call("PING")
    with pytest.raises(NotNow):
        own_link.call("PING")
    own_server.start()
    assert own_link.call("PING") == b"PONG"


def test_the_check_at_the_start_names_the_setting_and_keeps_the_password(redis_url: str) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        Proxy(redis_url, lambda chunk: b"HTTP/1.1 400 Bad Request\r\n\r\n") as web,
    ):
        taken.listen()
        silent = f"redis://:s3cret@127.0.0.1:{taken.getsockname()[1]}"
        for url in (
            f"redis://:s3cret@127.0.0.1:{free_port()}",
            redis_url.replace("://:", "://:s3cret"),
            silent,
            web.url,
        ):
            with pytest.raises(StartRefused, match="USHER_REDIS_URL") as refused:
                check_reachable(url)
            assert "s3cret" not in str(refused.value)
            assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)", NotNow),
        ("UNBLOCKED client unblocked via CLIENT UNBLOCK", NotNow),
        ("UNBLOCKED the stream key no longer exists", GroupMissing),
        ("NOGROUP the consumer group this client was blocked on no longer exists", GroupMissing),
    ],
)
def test_a_wait_that_a_failover_ended_says_nothing_of_the_group(text: str, kind: type[Exception]) -> None:
    found = named(redis.ResponseError(text))
    assert type(found) is kind
    assert not isinstance(found, NotNow) or found.kind in ELSEWHERE
