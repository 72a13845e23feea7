"""The HTTP recipe with a real service and its database; the SQL sink for async handlers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import requests
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession

from tests.sinks import Mark, accounts, async_sink
from usher.consumer.sinks.http import Received, headers, received, refuse_by_status
from usher.consumer.sinks.outcomes import SinkMisused, SinkNotNow, StaleFence
from usher.consumer.sinks.sql import SqlSink


@pytest.fixture
def service(sink: SqlSink) -> Iterator[str]:
    """URL of a service that adds 5 to a ticket's account, as the recipe says."""

    class Charge(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            try:
                mark = received(self.headers)
                with sink.transaction(mark) as session:
                    session.execute(
                        sa.text(
                            "INSERT INTO accounts VALUES (:id, 5) ON CONFLICT (id) DO UPDATE SET total ="
                            " accounts.total + 5"
                        ),
                        {"id": mark.ticket_id},
                    )
                status = 200
            except StaleFence:
                status = 409
            except SinkNotNow:
                status = 503
            except SinkMisused:
                status = 400
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Charge)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()
    server.server_close()
    thread.join(20)


def test_a_service_that_keeps_uid_and_fence_charges_once(service: str, engine: sa.Engine) -> None:
    def handle(mark: Mark) -> None:
        refuse_by_status(mark, requests.post(service, headers=headers(mark), timeout=30).status_code)

    for mark in (Mark("ä/1", "a", 7), Mark("ä/1", "a", 7), Mark("ä/1", "b ö", 8), Mark("ä/1", "b ö", 9)):
        handle(mark)
    with pytest.raises(StaleFence):
        handle(Mark("ä/1", "c", 8))
    assert accounts(engine) == {"ä/1": 10}
    assert requests.post(service, timeout=30).status_code == 400


@pytest.mark.parametrize(
    "uid", ["order-17", "a b", "50%", "%41", 'q"\\', "ä\u20ac", "a\nb\0", "\udcff", "1700000000000-0"]
)
def test_any_uid_and_ticket_survive_the_headers(uid: str) -> None:
    sent = headers(Mark(uid, uid, 2**63 - 1))
    assert all(value.isascii() and value.isprintable() and value == value.strip() for value in sent.values())
    assert received(sent) == Received(uid, uid, 2**63 - 1)


@pytest.mark.parametrize("fence", ["", "-1", "1.5", "1e3", "x", str(2**63), "9" * 5000, "\u0661"])
def test_what_is_no_fence_is_refused(fence: str) -> None:
    with pytest.raises(SinkMisused, match="Usher-Fence"):
        received(headers(Mark("T", "a", 1)) | {"Usher-Fence": fence})


def test_a_message_without_a_ticket_travels_without_one(service: str, engine: sa.Engine) -> None:
    for uid, fence in (("b", 9), ("a", 5), ("b", 9)):
        assert requests.post(service, headers=headers(Mark("", uid, fence)), timeout=30).status_code == 200
    assert accounts(engine) == {"": 10}
    with pytest.raises(SinkMisused, match="headers are missing: Usher-Ticket"):
        received({"Idempotency-Key": "a", "Usher-Fence": "1"})


def test_answers_become_what_a_handler_should_raise() -> None:
    for status in (200, 204, 400, 404):
        refuse_by_status(Mark("T", "a", 1), status)
    for status in (408, 429, 500, 503):
        with pytest.raises(SinkNotNow):
            refuse_by_status(Mark("T", "a", 1), status)


def test_an_async_handler_stores_its_effect_once_too(postgres_url: str) -> None:
    async def story() -> list[tuple[str, int]]:
        async with async_sink(postgres_url) as made:

            @made.exactly_once
            async def handle(mark: Mark, session: AsyncSession) -> None:
                await session.execute(
                    sa.text(
                        "INSERT INTO accounts VALUES (:id, 1) ON CONFLICT (id) DO UPDATE SET total = accounts.total + 1"
                    ),
                    {"id": mark.ticket_id},
                )
                if mark.n < 0:
                    raise ZeroDivisionError

            await asyncio.gather(*(handle(Mark(f"T{number % 3}", f"u{number % 6}", 5)) for number in range(18)))
            with pytest.raises(StaleFence):
                await handle(Mark("T0", "new", 4))
            with pytest.raises(ZeroDivisionError):
                await handle(Mark("T0", "undone", 5, -1))
            with pytest.raises(SinkMisused, match="SqlSink"):
                made.exactly_once(lambda mark, session: None)  # type: ignore[arg-type, return-value]
            async with made.engine.connect() as connection:
                return [
                    (row.id, row.total)
                    for row in await connection.execute(sa.text("SELECT id, total FROM accounts ORDER BY id"))
                ]

    assert asyncio.run(story()) == [("T0", 2), ("T1", 2), ("T2", 2)]
