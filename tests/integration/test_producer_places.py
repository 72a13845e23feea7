"""Producers by URL, beside a client of redis-py, and on an event loop; and the recipes of docs/sending.md, run as they
stand there."""

from __future__ import annotations

import asyncio
import re
import types
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import flask
import pytest
import redis
import redis.asyncio

from tests.hands import ClientLink, NotNow
from tests.rules import ROOT
from usher import AsyncProducer, Link, Outgoing, Producer


def entries(link: Link) -> list[tuple[str, list[bytes]]]:
    return [(entry_id.decode(), flat) for entry_id, flat in link.call("XRANGE", "ticket_stream", "-", "+")]


def test_a_url_will_do(link: Link, redis_url: str) -> None:
    with Producer(redis_url) as producer:
        first = producer.send("42", {"n": 1})
    second = producer.send("42", {"n": 2})
    assert [entry_id for entry_id, _ in entries(link)] == [first, second]
    with pytest.raises(ValueError, match="decode_responses"):
        Producer(f"{redis_url}&decode_responses=True")


@pytest.mark.parametrize("package", [redis, redis.asyncio])
def test_beside_a_client_whatever_it_makes_of_replies(link: Link, redis_url: str, package: Any) -> None:
    client = package.Redis.from_url(redis_url, decode_responses=True)
    with Producer(client, dedup_s=60) as producer:
        sent = producer.send_many([Outgoing("42", {"n": n}, uid=f"order-{n}") for n in (1, 2, 1)])
        assert [one.repeated for one in sent] == [False, False, True]
        assert entries(link)[0] == (sent[0].id, [b"ticket_id", b"42", b"n", b"1", b"uid", b"order-1"])


@pytest.mark.parametrize("package", [redis, redis.asyncio])
def test_it_goes_where_the_client_goes(package: Any) -> None:
    client = package.Redis(host="127.0.0.1", port=9, password="secret", db=3)
    with pytest.raises(NotNow, match=r"127\.0\.0\.1:9") as refused:
        Producer(client, patience_s=0).send("42", {"n": 1})
    assert "secret" not in str(refused.value)
    over_tls = ClientLink(package.Redis(host="127.0.0.1", port=9, ssl=True, ssl_ca_certs="/ca.pem"), "test")
    assert over_tls.url == "rediss://127.0.0.1:9"
    with pytest.raises(NotNow):
        over_tls.call("PING")


def test_what_is_no_client_of_one_server_is_refused() -> None:
    sentinels = redis.Sentinel([("127.0.0.1", 9)])
    for place in (sentinels.master_for("mymaster"), object(), None):
        with pytest.raises(TypeError, match="give its URL"):
            Producer(place)


def test_on_an_event_loop_it_goes_on(link: Link, redis_url: str) -> None:
    async def send() -> list[str]:
        producer = AsyncProducer(redis.asyncio.Redis.from_url(redis_url), dedup_s=60)
        ids = await asyncio.gather(*(producer.send("42", {"n": n}, uid=f"order-{n}") for n in range(20)))
        many = await producer.send_many(Outgoing("7", {"n": n}) for n in range(3))
        await producer.send("42", {"n": 1}, due_ms=producer.ms_from_now(3600))
        await producer.close()
        return [*ids, *(one.id for one in many)]

    ids = asyncio.run(send())
    assert sorted(ids) == sorted(entry_id for entry_id, _ in entries(link))
    assert link.call("XLEN", "{ticket_stream}:delayed") == 1


def test_while_redis_is_away_the_loops_own_threads_are_free() -> None:
    """The application looks names up on them."""

    async def send() -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        producer = AsyncProducer("redis://127.0.0.1:1", patience_s=5.0)
        sending = asyncio.gather(*(producer.send("42", {"n": n}) for n in range(3)))
        await asyncio.sleep(0)  # they begin
        await loop.run_in_executor(None, int)
        assert not sending.done()
        sending.cancel()

    asyncio.run(send())


def recipe(word: str, redis_url: str) -> types.SimpleNamespace:
    """Run the block of docs/sending.md that imports ``word``."""
    document = (ROOT / "docs" / "sending.md").read_text()
    [block] = [one for one in re.findall(r"```python\n(.*?)```", document, re.DOTALL) if f"from {word} import" in one]
    module = {"REDIS_URL": redis_url, "__name__": "shop"}
    exec(block, module)  # noqa: S102 - our own document
    return types.SimpleNamespace(**module)


def test_the_recipe_for_flask(link: Link, redis_url: str) -> None:
    made = recipe("flask", redis_url)
    app: flask.Flask = made.app
    answer = app.test_client().post("/orders/42/paid")
    assert answer.status_code == 202
    assert [entry_id for entry_id, _ in entries(link)] == [answer.get_json()["id"]]
    made.producer.close()


def test_the_recipe_for_django(link: Link, redis_url: str) -> None:
    from tests import django_shop

    django_shop.set_up()
    from django.db import transaction

    made = recipe("django.db", redis_url)
    saved: list[bool] = []

    def save() -> None:
        saved.append(True)
        assert entries(link) == []

    order = types.SimpleNamespace(pk=42, save=save)
    with pytest.raises(KeyError), transaction.atomic():
        made.pay(order)
        raise KeyError("rolled back")
    assert entries(link) == []
    made.pay(order)
    assert [flat for _, flat in entries(link)] == [[b"ticket_id", b"42", b"kind", b"paid"]]
    made.producer.close()
    transaction.get_connection().close()
