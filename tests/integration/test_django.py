"""Django: the outbox on its own connection, and its tasks as messages."""

from __future__ import annotations

import datetime
import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests import django_shop
from tests.outboxes import Hand, Outbox, entries
from usher import Invalid, write_to_outbox
from usher.common.outbox.rows import schema
from usher.common.outbox.store import OutboxMisused, OutboxStore
from usher.common.redis.client import Link
from usher.common.sql.alchemy import sa
from usher.testing import Kit, message

django_shop.set_up()

from django.core.exceptions import ImproperlyConfigured  # noqa: E402
from django.db import OperationalError, connection, connections, transaction  # noqa: E402
from django.db.migrations import RunSQL  # noqa: E402
from django.test import override_settings  # noqa: E402
from django.utils import timezone  # noqa: E402

from tests.django_shop import tasks  # noqa: E402
from usher.consumer.handlers.django_tasks import _reaches_databases  # noqa: E402
from usher.django import TaskBackend, run_task, ticket  # noqa: E402

_ROWS = "SELECT ticket_id, action, object, CAST(data AS TEXT) FROM staged_log_records ORDER BY id"


def connect_django(url: str) -> None:
    """Have Django use the database of an outbox."""
    made = sa.engine.make_url(url)
    if made.get_backend_name() == "sqlite":
        database = {"ENGINE": "django.db.backends.sqlite3", "NAME": made.database}
    else:
        database = {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": made.database,
            "USER": made.username,
            "HOST": made.query["host"],
            "OPTIONS": {"options": made.query["options"]},
        }
    connections.settings = connections.configure_settings({"default": database})
    del connections["default"]


@pytest.fixture(params=["sqlite", "postgresql"])
def outbox_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Without MySQL: Django takes no driver for it but mysqlclient, which is compiled."""
    postgres = request.param == "postgresql"
    return str(request.getfixturevalue("postgres_schema_url")) if postgres else f"sqlite:///{tmp_path / 'outbox.db'}"


@pytest.fixture
def site(outbox: Outbox) -> Iterator[Outbox]:
    """Django on the database of an outbox, in each of the two databases."""
    assert connection.vendor
    connect_django(outbox.url)
    tasks.done.clear()
    yield outbox
    connection.close()


@pytest.fixture
def redis_site(usher_redis: str) -> Iterator[None]:
    """Tasks go to Redis straight away."""
    tasks.done.clear()
    options = {"redis": usher_redis, "ticket": "account"}
    with override_settings(TASKS={"default": {"BACKEND": "usher.django.TaskBackend", "OPTIONS": options}}):
        yield


def test_a_record_is_of_djangos_transaction(site: Outbox) -> None:
    with pytest.raises(KeyError), transaction.atomic():
        write_to_outbox(connection, ticket_id="1", action="create", object="ride")
        raise KeyError("rolled back")
    with transaction.atomic():
        write_to_outbox(connections["default"], ticket_id="2", action="create", object="100% :data", data={"n": "ä"})
        assert site.scalar("SELECT count(*) FROM staged_log_records") == 0  # not committed: no connection of its own
        with pytest.raises(KeyError), transaction.atomic():  # a savepoint
            write_to_outbox(connection, ticket_id="3", action="create", object="ride")
            raise KeyError("rolled back")
    assert site.rows(_ROWS) == [("2", "create", "100% :data", '{"n":"ä"}')]


def test_without_a_transaction_nothing_is_written(site: Outbox) -> None:
    with pytest.raises(OutboxMisused, match=r"transaction\.atomic"):
        write_to_outbox(connection, ticket_id="1", action="create", object="ride")
    assert site.rows(_ROWS) == []


def test_a_migration_of_django_makes_the_tables(outbox_url: str) -> None:
    assert connection.vendor
    connect_django(outbox_url)
    store = OutboxStore(outbox_url)
    with connection.schema_editor() as editor:
        RunSQL(schema(connection.vendor)).database_forwards("shop", editor, None, None)
    connection.close()
    store.check()
    store.close()


def test_a_task_is_sent_with_the_commit_and_run(site: Outbox, hands: Callable[..., Hand], link: Link) -> None:
    with pytest.raises(KeyError), transaction.atomic():
        tasks.book.enqueue(42, "1")
        raise KeyError("rolled back")
    with transaction.atomic():
        result = tasks.book.enqueue(42, amount="2", note="ä")
    hands(site).turn()
    [fields] = entries(link)
    assert json.loads(fields.pop(b"data")) == {"args": [42], "kwargs": {"amount": "2", "note": "ä"}}
    path = b"tests.django_shop.tasks.book"
    assert fields == {b"ticket_id": b"42", b"uid": result.id.encode(), b"action": b"task", b"object": path}
    run_task(message("42", {name.decode(): value for name, value in entries(link)[0].items() if name != b"ticket_id"}))
    assert tasks.done == [(42, "2", "ä")]
    assert (result.status, result.is_finished) == ("READY", False)
    with pytest.raises(NotImplementedError):
        result.refresh()


def test_a_task_is_a_message_of_its_ticket(redis_site: None, usher_kit: Callable[..., Kit]) -> None:
    kit = usher_kit("usher.django:run_task", retry_seconds=10, max_attempts=3)
    for amount in ("1", "many", "3"):
        tasks.book.enqueue(42, amount)
    tasks.again.enqueue()
    tasks.remind.enqueue("you")
    kit.run(for_s=100)
    assert [one for one in tasks.done if one[0] == 42] == [(42, "1", ""), (42, "3", "")]
    assert [one for one in tasks.done if one[0] != 42] == [(7, 1), "you", (7, 2), (7, 3)]
    assert {call.ticket_id for call in kit.retried} == {"7"}
    assert [(letter.ticket, letter.reason, letter.error) for letter in kit.given_up] == [
        (b"42", "gave_up", "GiveUp: that is no amount")
    ]


def test_what_was_sent_in_a_transaction_that_is_rolled_back_is_told(
    site: Outbox, redis_site: None, usher_kit: Callable[..., Kit], caplog: pytest.LogCaptureFixture
) -> None:
    kit = usher_kit("usher.django:run_task")

    def told() -> list[str]:
        gc.collect()
        return [record.__dict__["facts"]["uid"] for record in caplog.records if "rolled_back" in record.getMessage()]

    tasks.book.enqueue(42, "0")
    with transaction.atomic():
        tasks.book.enqueue(42, "1")
        with pytest.raises(KeyError), transaction.atomic():  # a savepoint
            inner = tasks.book.enqueue(42, "2")
            raise KeyError("rolled back")
        assert told() == [inner.id]
    assert told() == [inner.id]
    with pytest.raises(KeyError), transaction.atomic():
        outer = tasks.book.enqueue(42, "3")
        raise KeyError("rolled back")
    assert told() == [inner.id, outer.id]
    kit.run()
    assert len(kit.calls) == 4, "they run all the same"


def test_a_database_that_is_only_closed_is_not_away(site: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    idle = connection.copy()
    monkeypatch.setattr(connections, "all", lambda **_: [connection, idle])
    assert idle.connection is None and _reaches_databases()
    idle.close()
    monkeypatch.setattr(idle, "connect", mock.Mock(side_effect=OperationalError("refused")))
    assert not _reaches_databases()


def test_a_task_for_later_waits_beside_the_stream(
    redis_site: None, usher_kit: Callable[..., Kit], usher_redis: str
) -> None:
    usher_kit("usher.django:run_task")  # an empty Redis
    due = timezone.now() + datetime.timedelta(hours=1)
    tasks.book.using(run_after=due).enqueue(42, "1")
    link = Link(usher_redis, "test")
    [[_, flat]] = link.call("XRANGE", "{ticket_stream}:delayed", "-", "+")
    link.close()
    assert flat[:2] == [b"due_ms", b"%d" % int(due.timestamp() * 1000)]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"action": "create", "object": "ride", "data": "{}"}, "action is 'create'"),
        ({"action": "task", "object": "tests.django_shop.tasks.book", "data": "[]"}, "data is not"),
        (
            {"action": "task", "object": "tests.django_shop.tasks.book", "data": '{"args": 1, "kwargs": {}}'},
            "data is not",
        ),
    ],
)
def test_what_is_no_task_is_invalid(fields: dict[str, str], told: str) -> None:
    with pytest.raises(Invalid, match=told):
        run_task(message("42", fields))


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("tests.abuse.book", "belongs to no app"),  # a module that is there, and is not imported
        ("tests.django_shop.tasks.nothing", "nothing"),
        ("tests.django_shop.tasks.no_task", "is no task"),
        ("", "belongs to no app"),
    ],
)
def test_only_tasks_of_installed_apps_are_run(path: str, told: str) -> None:
    with pytest.raises(LookupError, match=told):
        run_task(message("42", action="task", object=path, data='{"args": [7], "kwargs": {}}'))
    assert "never" not in tasks.done


def test_a_rehearsal_runs_no_task() -> None:
    tasks.done.clear()
    data = '{"args": [7, "1"], "kwargs": {}}'
    with pytest.raises(Exception, match="rehearsals"):
        run_task(message("7", action="task", object="tests.django_shop.tasks.book", data=data, rehearsal=True))
    assert tasks.done == []


def test_a_task_without_a_ticket_is_refused_where_it_is_declared() -> None:
    with pytest.raises(Exception, match="name the argument that is the ticket"):
        tasks.task(tasks.no_task)
    with pytest.raises(Exception, match="has no argument 'order'"):
        tasks.task(ticket("order")(tasks.no_task))
    del tasks.no_task.__usher_ticket__  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="below @task"):
        ticket("account")(tasks.book)


def test_a_ticket_is_a_text_or_a_whole_number(site: Outbox) -> None:
    with transaction.atomic():
        for wrong in (True, None, 1.5, []):
            with pytest.raises(TypeError, match="which names the ticket, is of type"):
                tasks.book.enqueue(wrong, "1")
        with pytest.raises(OutboxMisused, match="empty_ticket_id"):
            tasks.book.enqueue("", "1")
        with pytest.raises(TypeError, match="amount"):
            tasks.book.enqueue(42)
    assert site.rows(_ROWS) == []


@pytest.mark.parametrize(
    ("params", "told"),
    [
        ({}, "one of outbox"),
        ({"OPTIONS": {"outbox": "default", "redis": "redis://x"}}, "one of outbox"),
        ({"OPTIONS": {"outbox": "default", "strem": "x"}}, "no option strem"),
        ({"OPTIONS": {"outbox": "default"}, "QUEUES": ["a", "b"]}, "a queue is a stream"),
    ],
)
def test_options_that_say_nothing_are_refused(params: dict[str, Any], told: str) -> None:
    with pytest.raises(ImproperlyConfigured, match=told):
        TaskBackend("default", params)
