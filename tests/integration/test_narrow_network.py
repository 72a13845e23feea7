"""What is sent over a narrow network takes as long as it takes; only silence is an error."""

from __future__ import annotations

import time

import pytest

from tests.proxy import Proxy
from usher.common.base.errors import ReplyUnknown
from usher.common.redis.client import Link
from usher.common.sending.producer import BATCH_BYTES, Outgoing, Producer

_TIMEOUT_S = 0.6
#: Takes four times as long.
_LARGE, _BYTES_PER_S = 1_200_000, 500_000


def test_a_large_command_may_take_longer_than_the_timeout(redis_url: str, link: Link) -> None:
    with Proxy(redis_url, bytes_per_s=_BYTES_PER_S) as proxy:
        far = Link(proxy.url, "far", timeout_s=_TIMEOUT_S)
        assert far.call("SET", "k", b"x" * _LARGE) == b"OK"
        assert far.pipeline(
            [("SET", "a", b"x" * (_LARGE // 2)), ("SET", "b", b"x" * (_LARGE // 2)), ("STRLEN", "k")]
        ) == [b"OK", b"OK", _LARGE]
        assert far.connections == 1
        far.close()


@pytest.mark.parametrize("size", [10, _LARGE, 20 * _LARGE])
def test_a_command_that_does_not_get_on_is_given_up_in_time(redis_url: str, link: Link, size: int) -> None:
    with Proxy(redis_url, bytes_per_s=1e9) as proxy:
        far = Link(proxy.url, "far", timeout_s=_TIMEOUT_S)
        assert far.call("PING") == b"PONG"
        proxy.bytes_per_s = None
        began_s = time.monotonic()
        with pytest.raises(ReplyUnknown):
            far.call("SET", "k", b"x" * size)
        assert time.monotonic() - began_s < (1.8 if size == 10 else 6) * _TIMEOUT_S
        far.close()


@pytest.mark.parametrize("dedup_s", [0.0, 60.0])
def test_a_producer_sends_large_messages_over_a_narrow_network(redis_url: str, link: Link, dedup_s: float) -> None:
    with Proxy(redis_url, bytes_per_s=_BYTES_PER_S) as proxy:
        far = Link(proxy.url, "far", timeout_s=_TIMEOUT_S)
        producer = Producer(far, "s", dedup_s=dedup_s)
        sent = producer.send_many(Outgoing("42", {"body": "x" * (_LARGE // 4)}, f"uid-{number}") for number in range(4))
        assert [one.repeated for one in sent] == [False] * 4
        assert link.call("XLEN", "s") == 4
        far.close()


def test_a_batch_of_large_messages_is_no_longer_than_it_must_be(redis_url: str, link: Link) -> None:
    """When the network breaks again and again, what was sent before stays sent."""
    requests: list[int] = []

    class Counted(Link):
        def pipeline(self, commands):  # type: ignore[no-untyped-def]
            requests.append(len(commands))
            return super().pipeline(commands)

    far = Counted(redis_url, "far")
    half = BATCH_BYTES // 2
    messages = [Outgoing("42", {"body": "x" * size}) for size in (half, half, 10, 4 * half, 10, 10)]
    sent = Producer(far, "s").send_many(messages)
    assert requests == [2, 2, 2]
    assert [one.id.encode() for one in sent] == [entry[0] for entry in link.call("XRANGE", "s", "-", "+")]
    far.close()
