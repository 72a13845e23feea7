"""The outbox with real programs: killed at every step, and the rocket rides."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import requests
import sqlalchemy as sa
from prometheus_client.parser import text_string_to_metric_families

from examples.rides.source import Source, create_app
from tests.commands import usher
from tests.mysql import new_database
from tests.outboxes import Outbox, add, made_outbox, new_schema, uids, until
from tests.postgres import find_binaries
from tests.process.killed_streamer import POINTS
from tests.process.machine import ROOT, USHER, environ_for
from usher.common.outbox.log_consumer import LogConsumer
from usher.common.redis.client import Link
from usher.common.redis.embedded import free_port

pytestmark = pytest.mark.process

_ROWS = 45


def _streamer(point: str, outbox: Outbox, redis_url: str, folder: Path) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "tests.process.killed_streamer", point, outbox.url, redis_url, point]
    return subprocess.Popen(words, cwd=ROOT, env=environ_for(folder) | {"PYTHONPATH": str(ROOT)})


@pytest.mark.parametrize("server", ["postgresql", pytest.param("mysql", marks=pytest.mark.slow)])
def test_a_streamer_killed_at_any_step_loses_nothing_and_nothing_is_effective_twice(
    redis_url: str, link: Link, tmp_path: Path, folder: Path, request: pytest.FixtureRequest, server: str
) -> None:
    """All points at once, each with an outbox and a stream of its own: first one that dies there, then one that goes
    on. Every other outbox is in PostgreSQL, where there is one, or in MySQL."""
    postgres = request.getfixturevalue("postgres") if server == "postgresql" and find_binaries() is not None else None
    mysql = request.getfixturevalue("mysql") if server == "mysql" else None
    points = [*POINTS, "before the answer is read"]
    outboxes, written = {}, {}
    for at, point in enumerate(points):
        url = f"sqlite:///{tmp_path / f'{at}.db'}"
        if at % 2:
            url = new_schema(postgres) if postgres else new_database(mysql) if mysql else url
        outbox = outboxes[point] = made_outbox(url)
        written[point] = outbox.stage_many(_ROWS)
        with outbox.engine.begin() as connection:
            connection.execute(
                sa.text(
                    "INSERT INTO staged_log_records (uid, ticket_id, action, object) VALUES ('refused', '', 'a', 'o')"
                )
            )
    doomed = {point: _streamer(point, outbox, redis_url, folder) for point, outbox in outboxes.items()}
    try:
        codes = {point: process.wait(60) for point, process in doomed.items()}
    finally:
        for process in doomed.values():
            process.kill()
            process.wait()
    assert codes == dict.fromkeys(points, -signal.SIGKILL)
    sent_before = {point: len(uids(link, point)) for point in points}
    _go_on(outboxes, redis_url, link)
    for point, outbox in outboxes.items():
        assert outbox.store.waiting() == (0, 1), point
        assert list(dict.fromkeys(uids(link, point))) == written[point], f"{point}: lost, or out of order"
        with LogConsumer("all", point, outbox.engine, redis_url=redis_url, batch=7) as consumer:
            while consumer.step(add):  # type: ignore[arg-type]
                pass
            assert consumer.state()[1]["uids"] == written[point], f"{point}: effective twice, or not at all"
        outbox.close()
    twice = {point for point in points if len(uids(link, point)) > _ROWS}
    # In a server the removal is one statement, and over by then.
    between = "in the transaction that removes them"
    died_between = {"after they are added", "before they are removed"} | (
        {between} if outboxes[between].url.startswith("sqlite") else set()
    )
    assert died_between <= twice
    assert sent_before["after the rows are read"] == sent_before["before they are added"] == 10
    assert sent_before["after they are added"] == 20


def _go_on(outboxes: dict[str, Outbox], redis_url: str, link: Link) -> None:
    """The same again without faults, in here: each is the next leader when the dead one's lease has ended."""
    from usher.master.settings import StreamerSettings
    from usher.master.streamer.program import StreamerProgram

    programs = []
    try:
        for point, outbox in outboxes.items():
            settings = StreamerSettings(outbox_url=outbox.url, ticket_stream=point)
            programs.append(StreamerProgram(settings, redis_url, batch_rows=10, lease_s=1))
            programs[-1].start()
        for point, outbox in outboxes.items():
            until(lambda outbox=outbox: outbox.store.waiting()[0] == 0, f"{point}: not sent", 60)  # type: ignore[misc]
    finally:
        for program in programs:
            program.stop()


RIDES = [sys.executable, "-m", "examples.rides"]


def test_a_ride_may_be_sent_again_and_its_key_is_its_own(folder: Path) -> None:
    source = Source(f"sqlite:///{folder}/rides.db")
    client, ride = create_app(source).test_client(), {"rider": "r1", "distance": 7}

    def post(key: str, body: object) -> tuple[int, object]:
        answer = client.post("/rides", json=body, headers={"Idempotency-Key": key})
        return answer.status_code, answer.json

    assert [post("a", ride) for _ in range(2)] == [(201, {"id": "a", **ride})] * 2
    assert post("a", ride | {"distance": 8})[0] == 422
    assert post("b", ride)[0] == 201
    wrong: list[tuple[str, object]] = [("", ride), ("c" * 65, ride), ("c", []), ("c", ride | {"distance": "7"})]
    wrong += [("c", ride | {"distance": 0}), ("c", ride | {"more": 1}), ("c", ride | {"id": "d"}), ("c", {})]
    assert [post(*one)[0] for one in wrong] == [400] * len(wrong)
    assert (source.totals(), source.staged()) == ((2, 14), 2), "one row of the outbox for each ride"
    source.close()


@pytest.mark.slow
def test_rocket_rides(folder: Path) -> None:
    """With faults on, every consumer's total is that of the source table."""
    _ride(folder, 300, "--seed", "67")  # seeds whose faults come early


@pytest.mark.slow
def test_rocket_rides_in_postgres(folder: Path, postgres_schema_url: str) -> None:
    _ride(folder, 200, "--sql", postgres_schema_url, "--seed", "308")


def _ride(folder: Path, rides: int, *words: str) -> None:
    command, env = [*RIDES, "--rides", str(rides), *words, "--json"], environ_for(folder)
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stderr + done.stdout
    verdict = json.loads(done.stdout)
    assert verdict["clean"] is True
    assert (verdict["lost"], verdict["duplicates"]) == (0, 0)
    assert (verdict["sent"], verdict["wrong"]) == (rides, 0)
    faults = ("rolled_back", "sent_again", "reconciled", "double_sent_batches", "crashes")
    assert all(verdict[name] for name in faults), "a run without faults shows nothing"
    assert verdict["handled"] == verdict["sent"]
    assert verdict["kills"] == 3
    assert {(one["rides"], one["distance"]) for one in verdict["consumers"]} == {(verdict["sent"], verdict["distance"])}


@pytest.fixture
def streamer(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    """The command in this process: exit code, and all that it told."""
    monkeypatch.setattr("usher.master.streamer.cli.configure", lambda *given: None)  # logging belongs to the test run

    def run(*words: str) -> tuple[int, str]:
        code = usher("streamer", "--log-level", "error", *words)
        told = capsys.readouterr()
        return code, told.out + told.err

    return run


def test_the_command_makes_the_tables_and_says_what_is_wrong(
    tmp_path: Path, streamer: Callable[..., tuple[int, str]]
) -> None:
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    assert "CREATE TABLE staged_log_records" in streamer("--schema", "postgresql")[1]
    code, told = streamer("--outbox-url", url, "--waiting")
    assert (code, "usher streamer --migrate" in told) == (2, True)
    assert streamer("--outbox-url", url, "--migrate") == (0, "outbox: the tables are made\n")
    assert streamer("--outbox-url", url, "--migrate") == (0, "outbox: nothing to do\n")
    assert streamer("--outbox-url", url, "--waiting") == (0, "0 staged, 0 refused, 0 tickets halted by refused rows\n")
    assert streamer("--migrate") == (
        2,
        "usher: USHER_OUTBOX_URL is not set: name the database there, or with --outbox-url\n",
    )
    code, told = streamer("--redis-url", "http://127.0.0.1:1")
    assert (code, "USHER_REDIS_URL" in told) == (2, True)


def test_tables_that_cannot_be_made_are_told_in_one_line(
    tmp_path: Path, postgres_schema_url: str, streamer: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A database that is locked, one that nobody may write, and one in which this user may make nothing."""
    monkeypatch.setattr("usher.common.outbox.store._SQLITE_WAIT_S", 0.05)
    path, role = tmp_path / "shop.db", f"role_{os.urandom(4).hex()}"
    with contextlib.closing(sqlite3.connect(path)) as other:
        other.execute("BEGIN EXCLUSIVE")
        told = "usher: USHER_OUTBOX_URL: migrating the outbox: database is locked\n"
        assert streamer("--outbox-url", f"sqlite:///{path}", "--migrate") == (2, told)
    told = "usher: USHER_OUTBOX_URL: migrating the outbox: attempt to write a readonly database\n"
    assert streamer("--outbox-url", f"sqlite:///file:{path}?mode=ro&uri=true", "--migrate") == (2, told)
    engine = sa.create_engine(postgres_schema_url)
    with engine.begin() as connection:
        connection.execute(sa.text(f"CREATE ROLE {role} LOGIN"))
    url = sa.engine.make_url(postgres_schema_url).set(username=role).render_as_string(hide_password=False)
    try:
        assert streamer("--outbox-url", url, "--migrate") == (
            2,
            "usher: USHER_OUTBOX_URL: no schema has been selected to create in\n",
        )
    finally:
        with engine.begin() as connection:
            connection.execute(sa.text(f"DROP ROLE {role}"))
        engine.dispose()


def _told(url: str) -> tuple[int, dict[str, object], dict[str, float]]:
    """Status and body of the health page, and the metrics of the program or its outbox."""
    health = requests.get(f"{url}/api/health", timeout=5)
    page = requests.get(f"{url}/metrics", timeout=5).text
    families = text_string_to_metric_families(page)
    return (
        health.status_code,
        health.json(),
        {
            one.name: one.value
            for family in families
            for one in family.samples
            if one.labels in ({}, {"outbox": "outbox"})
        },
    )


@pytest.mark.slow
def test_streamers_tell_over_http_who_streams_and_since_when_rows_wait(
    redis_url: str, tmp_path: Path, folder: Path
) -> None:
    """Two of them, of one database, which fails for a while; then the first one is killed, and the other one goes
    on."""
    outbox = made_outbox(f"sqlite:///{tmp_path / 'outbox.db'}")
    ports = free_port(2)
    urls = [f"http://127.0.0.1:{ports + number}" for number in range(2)]
    given = environ_for(folder) | {"USHER_REDIS_URL": redis_url, "USHER_OUTBOX_URL": outbox.url}
    with contextlib.ExitStack() as stack:
        programs = []

        def start(url: str) -> None:
            words = [*USHER, "streamer", "--outbox-bind", url.removeprefix("http://")]
            programs.append(stack.enter_context(subprocess.Popen(words, cwd=folder, env=given)))
            stack.callback(programs[-1].kill)
            until(lambda: _answers(url), f"{url} does not answer", 30)

        start(urls[0])
        outbox.stage_many(5)
        with outbox.engine.begin() as connection:
            connection.execute(
                sa.text(
                    "INSERT INTO staged_log_records (uid, ticket_id, action, object) VALUES ('refused', '', 'a', 'o')"
                )
            )
        until(lambda: _told(urls[0])[1]["sent"] == 5, "not sent", 20)
        until(lambda: _told(urls[0])[1]["refused"] == 1, "not refused", 20)
        start(urls[1])
        status, health, metrics = _told(urls[1])
        assert (status, health["role"], health["streams"], health["behind_seconds"]) == (200, "streamer", False, 0.0)
        assert (metrics["usher_outbox_streams"], metrics["usher_outbox_behind_seconds"]) == (0, 0)
        status, health, metrics = _told(urls[0])
        assert (status, health["streams"], metrics["usher_outbox_streams"]) == (200, True, 1)
        assert (metrics["usher_outbox_sent_rows_total"], metrics["usher_outbox_refused_rows_total"]) == (5, 1)
        assert metrics["usher_outbox_behind_seconds"] < 2

        with outbox.engine.begin() as connection:
            connection.execute(sa.text("ALTER TABLE staged_log_records RENAME TO elsewhere"))
        until(lambda: any(_told(url)[0] == 503 for url in urls), "nobody says that the database fails", 20)
        [reason] = next(told["reasons"] for status, told, _ in map(_told, urls) if status == 503)  # type: ignore[misc]
        assert reason == "stream: OperationalError; the log says more"
        with outbox.engine.begin() as connection:
            connection.execute(sa.text("ALTER TABLE elsewhere RENAME TO staged_log_records"))

        programs[0].kill()
        outbox.stage_many(7)
        until(lambda: outbox.store.waiting()[0] == 0, "the other one does not go on", 30)
        for program in programs[1:]:
            program.terminate()
            assert program.wait(20) == 0


def _answers(url: str) -> bool:
    with contextlib.suppress(requests.ConnectionError):
        return requests.get(f"{url}/api/health/live", timeout=5).ok
    return False
