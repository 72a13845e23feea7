"""Rocket rides: messages that are sent twice, processes that die before and after the commit, real consumers, two
databases - and every ride is paid once.

The faults are those of Stripe's example of idempotent requests: 10 % double send, 10 % crash before the commit, 5 %
crash after it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.hands import EmbeddedRedis
from tests.process.crew import KEYS, Crew
from tests.sinks import quick_folder
from tests.topologies import figures
from usher import Link, SqlSink

pytestmark = pytest.mark.process

_RIDES, _RIDERS = 60, 24
_DOUBLE, _BEFORE, _AFTER = 0.10, 0.10, 0.05
_HANDLERS = '''
import os
import signal
import time
from pathlib import Path
import sqlalchemy as sa
from usher.consumer.sinks.sql import SqlSink

SINKS = {name: SqlSink(sa.create_engine(os.environ["RIDES_" + name.upper()])) for name in ("sqlite", "postgresql")}


def handle(message):
    """Pays a ride. A ride that is to crash does so the first time that it gets there."""
    fields = message.fields
    with SINKS[fields["database"]].transaction(message) as session:
        paid = {"rider": message.ticket_id, "uid": message.uid, "amount": int(fields["amount"])}
        session.execute(sa.text("INSERT INTO ledger (rider, uid, amount) VALUES (:rider, :uid, :amount)"), paid)
        session.execute(sa.text("UPDATE riders SET total = total + :amount WHERE rider = :rider"), paid)
        crash("before", message)
    crash("after", message)


def crash(when, message):
    if message.fields["crash"] != when:
        return
    try:
        (Path(os.environ["RIDES_CRASHED"]) / message.uid).touch(exist_ok=False)
    except FileExistsError:
        return
    time.sleep(0.3)  # others of this process get to their own crash meanwhile: one end of a process is a crash of several rides
    os.kill(os.getpid(), signal.SIGKILL)
'''
FILES = {"rides.py": _HANDLERS}


@dataclass(frozen=True)
class Ride:
    uid: str
    rider: str
    amount: int
    database: str
    crash: str
    is_doubled: bool


def rides(rng: random.Random) -> list[Ride]:
    """The source that effects are compared with. So many of each fault, not about so many."""
    faults = ["before"] * round(_RIDES * _BEFORE) + ["after"] * round(_RIDES * _AFTER)
    faults += [""] * (_RIDES - len(faults))
    rng.shuffle(faults)
    doubled = set(rng.sample(range(_RIDES), round(_RIDES * _DOUBLE)))
    return [
        Ride(
            f"ride-{n}",
            f"R{rng.randrange(_RIDERS)}",
            rng.randrange(1, 1000),
            ("sqlite", "postgresql")[n % 2],
            faults[n],
            n in doubled,
        )
        for n in range(_RIDES)
    ]


def send(link: Link, source: list[Ride], rng: random.Random) -> int:
    """Second copies come some messages later; the number of entries."""
    queue = list(enumerate(source))
    queue += [(at + rng.randrange(1, 9), ride) for at, ride in enumerate(source) if ride.is_doubled]
    for _, ride in sorted(queue, key=lambda placed: placed[0]):
        fields = {"uid": ride.uid, "amount": ride.amount, "database": ride.database, "crash": ride.crash}
        link.call(
            "XADD", KEYS.stream, "*", "ticket_id", ride.rider, *(part for pair in fields.items() for part in pair)
        )
    return len(queue)


def prepared(url: str) -> sa.Engine:
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        serial = "INTEGER PRIMARY KEY" if engine.dialect.name == "sqlite" else "BIGSERIAL PRIMARY KEY"
        connection.execute(
            sa.text(f"CREATE TABLE ledger (n {serial}, rider TEXT NOT NULL, uid TEXT NOT NULL, amount BIGINT NOT NULL)")
        )
        connection.execute(sa.text("CREATE TABLE riders (rider TEXT PRIMARY KEY, total BIGINT NOT NULL)"))
        connection.execute(
            sa.text("INSERT INTO riders VALUES (:rider, 0)"), [{"rider": f"R{n}"} for n in range(_RIDERS)]
        )
    SqlSink(engine).create_tables()
    return engine


@pytest.fixture
def sqlite_url() -> Iterator[str]:
    with quick_folder() as fast:
        yield f"sqlite:///{fast}/rides.db"


def test_every_ride_is_paid_once_although_it_is_sent_twice_and_its_process_is_killed(
    folder: Path, sqlite_url: str, postgres_url: str
) -> None:
    rng = random.Random(20)
    source = rides(rng)
    urls = {"sqlite": sqlite_url, "postgresql": postgres_url}
    engines = {name: prepared(url) for name, url in urls.items()}
    crashed = folder / "crashed"
    crashed.mkdir()
    # A ride may be under way in many crashes of others; that it is no killer itself is not what is tried here.
    environ = {
        "RIDES_CRASHED": str(crashed),
        "USHER_MAX_ATTEMPTS": "100",
        **{f"RIDES_{name.upper()}": url for name, url in urls.items()},
    }
    with (
        EmbeddedRedis(folder / "redis", port=None, durable=False) as server,
        Crew(folder, server.url, **environ) as crew,
    ):
        link = Link(server.url, "test")
        crew.start(1, ["c1", "c2"], "rides:handle")
        entries = send(link, source, rng)
        crew.wait_until_settled(link, within_s=90)
        crew.until(
            lambda: len(list(crashed.iterdir())) == round(_RIDES * (_BEFORE + _AFTER)), 30, "all crashes have happened"
        )
        assert link.call("XLEN", KEYS.dead) == 0, crew.log()
        assert entries == _RIDES + round(_RIDES * _DOUBLE)
        figures(
            entries=entries,
            crashes=len(list(crashed.iterdir())),
            incarnations=len(crew.events("consumer_registered", "c")),
        )
        link.close()
    for name, engine in engines.items():
        wanted = [ride for ride in source if ride.database == name]
        with engine.connect() as connection:
            paid = [
                tuple(row) for row in connection.execute(sa.text("SELECT rider, uid, amount FROM ledger ORDER BY n"))
            ]
            totals = {row.rider: row.total for row in connection.execute(sa.text("SELECT rider, total FROM riders"))}
        engine.dispose()
        assert Counter(uid for _, uid, _ in paid) == Counter(ride.uid for ride in wanted), f"{name}: each effect once"
        assert totals == {
            f"R{n}": sum(ride.amount for ride in wanted if ride.rider == f"R{n}") for n in range(_RIDERS)
        }, name
        for number in range(_RIDERS):
            in_order = [ride.uid for ride in wanted if ride.rider == f"R{number}"]
            assert [uid for rider, uid, _ in paid if rider == f"R{number}"] == in_order, (
                f"{name}: in the order in which they were sent"
            )
