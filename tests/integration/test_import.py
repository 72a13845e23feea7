"""``usher import``: real queues of Celery and RQ, and BullMQ's layout; what was, and what was not imported."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from usher import Link
from usher.cli import load_command

_IMPORT = load_command("usher.common.cli.import_jobs:import_jobs")


def imported(url: str, library: str, queue: str, ticket: str, *more: str) -> tuple[int, dict[str, Any]]:
    words = [library, "--queue", queue, "--ticket", ticket, "--json", *more]
    done = CliRunner(env={"USHER_REDIS_URL": url}).invoke(_IMPORT, words)
    return done.exit_code, json.loads(done.stdout)


def messages(link: Link) -> list[tuple[str, str, Any]]:
    found = []
    for _, flat in link.call("XRANGE", "ticket_stream", "-", "+"):
        fields = {name.decode(): value.decode() for name, value in zip(flat[::2], flat[1::2], strict=True)}
        found.append((fields["ticket_id"], fields["kind"], json.loads(fields["body"])))
    return found


def everything(link: Link) -> dict[bytes, bytes]:
    return {key: link.call("DUMP", key) for key in link.call("KEYS", "*")}


def celery_jobs(url: str, number: int) -> None:
    celery = pytest.importorskip("celery")
    broker = url.replace("unix://", "redis+socket://").replace("?db=", "?virtual_host=")  # kombu's words for it
    app = celery.Celery("shop", broker=broker)
    with app.connection_for_write() as connection:
        for at in range(number):
            app.send_task("shop.book", (at % 3, "12.50"), {"at": at, "word": "ü"}, connection=connection)
        app.send_task("shop.later", (1,), countdown=3600, connection=connection)
        app.send_task("shop.nobody", ((),), connection=connection)
        app.send_task("shop.linked", (1,), link=app.signature("shop.next"), connection=connection)
        app.send_task("shop.pickled", (1,), serializer="pickle", connection=connection)
        app.send_task("shop.low", (7,), priority=9, connection=connection)
    app.close()


def rq_jobs(url: str, number: int) -> None:
    rq = pytest.importorskip("rq")
    redis = pytest.importorskip("redis")
    connection = redis.Redis.from_url(url)
    queue = rq.Queue("mail", connection=connection, serializer=rq.serializers.JSONSerializer)
    for at in range(number):
        queue.enqueue("shop.book", at % 3, "12.50", at=at, word="ü")
    rq.Queue("mail", connection=connection).enqueue("shop.pickled", 1)
    queue.enqueue("shop.nobody", None)
    connection.close()


def bullmq_jobs(link: Link, number: int) -> None:
    """As BullMQ's addStandardJob leaves them: the hash, and the id at the left of the list."""
    for at in range(number + 2):
        data = json.dumps({"order": {"id": at % 3}, "at": at} if at <= number else {})
        more = ["parentKey", "bull:other:1"] if at == number else []
        link.call(
            "HSET", f"bull:orders:{at}", "name", "paid", "data", data, "opts", "{}", "timestamp", 1700000000000, *more
        )
        link.call("LPUSH", "bull:orders:wait", at)
    link.call("ZADD", "bull:orders:delayed", 1, "later")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("library", ["celery", "rq", "bullmq"])
def test_what_waits_is_shown_and_then_taken_in_its_order(redis_url: str, link: Link, library: str) -> None:
    number = 230  # three pages
    if library == "celery":
        celery_jobs(redis_url, number)
        queue, ticket = "celery", "args.0"
        bodies: list[Any] = [{"args": [at % 3, "12.50"], "kwargs": {"at": at, "word": "ü"}} for at in range(number)]
        taken = [(str(at % 3), "shop.book", body) for at, body in enumerate(bodies)]
        taken.append(("7", "shop.low", {"args": [7], "kwargs": {}}))
        stays = {"it is for later", "it has callbacks, or belongs to a chain or chord"}
        stays |= {
            "it has no args.0 that is a text or a whole number",
            "its arguments are no JSON but application/x-python-serialize",
        }
    elif library == "rq":
        rq_jobs(redis_url, number)
        queue, ticket = "mail", "args.0"
        bodies = [{"args": [at % 3, "12.50"], "kwargs": {"at": at, "word": "ü"}} for at in range(number)]
        taken = [(str(at % 3), "shop.book", body) for at, body in enumerate(bodies)]
        stays = {"it is pickled: reading it could run anything", "it has no args.0 that is a text or a whole number"}
    else:
        bullmq_jobs(link, number)
        queue, ticket = "orders", "order.id"
        bodies = [{"order": {"id": at % 3}, "at": at} for at in range(number)]
        taken = [(str(at % 3), "paid", body) for at, body in enumerate(bodies)]
        stays = {"a parent waits for it", "it has no order.id that is a text or a whole number"}
    before = everything(link)

    code, shown = imported(redis_url, library, queue, ticket)
    assert (code, shown["importable"], shown["sent"]) == (1, len(taken), None), "something stays"
    assert set(shown["stays"]) == stays
    assert everything(link) == before, "a preview changes nothing"

    code, told = imported(redis_url, library, queue, ticket, "--take")
    assert (code, told["sent"], told["taken_by_a_worker_too"], told["error"]) == (1, len(taken), 0, None)
    assert messages(link) == taken
    assert told["stays"] == shown["stays"]

    code, again = imported(redis_url, library, queue, ticket, "--take")
    assert (again["importable"], again["stays"]) == (0, shown["stays"]), "what stays is still there"
    assert len(messages(link)) == len(taken)


@pytest.mark.filterwarnings("ignore")
def test_a_job_that_was_sent_and_not_removed_is_sent_once(redis_url: str, link: Link) -> None:
    bullmq_jobs(link, 3)
    kept = link.call("LRANGE", "bull:orders:wait", 0, -1)
    hashes = {key: link.call("DUMP", key) for key in link.call("KEYS", "bull:orders:[0-9]*")}
    imported(redis_url, "bullmq", "orders", "order.id", "--take")
    link.call("DEL", "bull:orders:wait")  # as if it had ended before it removed them
    link.call("RPUSH", "bull:orders:wait", *kept)
    for key, dump in hashes.items():
        link.call("RESTORE", key, 0, dump, "REPLACE")
    _, told = imported(redis_url, "bullmq", "orders", "order.id", "--take")
    assert (told["sent"], told["repeated"], len(messages(link))) == (0, 3, 3)
    assert told["beside"] == {"for later": 1}
