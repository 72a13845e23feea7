"""The data sources on their own: each row as Redis has it, whole, in parts of any size."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.audit.seeding import GROUP, Seeder
from usher.common.base.errors import StartRefused
from usher.common.redis.client import Link
from usher.master.audit.engine import SparkEngine, refusing

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

ROOT = Path(__file__).parents[2]


def read(spark: SparkEngine, source: str, url: str, **options: Any) -> DataFrame:
    return spark.spark.read.format(source).options(url=url, group=GROUP, **options).load()


@pytest.fixture
def filled(link: Link) -> Seeder:
    """200 entries of 7 tickets, every third one pending for c1:1, bursts in between."""
    seeder = Seeder(link, "s")
    ids = [f"{n if n < 100 else 1_000_000 + n}-{n % 3}" for n in range(1, 201)]
    seeder.add(*((entry_id, f"T{at % 7}") for at, entry_id in enumerate(ids)))
    seeder.read()
    seeder.live("c1:1")
    seeder.own("c1:1", *ids[::3], deliveries=4)
    seeder.over(*(entry_id for at, entry_id in enumerate(ids) if at % 3))
    return seeder


@pytest.mark.parametrize("parts", [1, 7])
def test_pending_entries_come_with_their_tickets_each_once(
    spark: SparkEngine, filled: Seeder, link: Link, redis_url: str, parts: int
) -> None:
    rows = read(spark, "redis_pending", redis_url, stream="s", partitions=parts).collect()
    pending = link.call("XPENDING", "s", GROUP, "-", "+", 1000)
    assert sorted(row.id for row in rows) == sorted(entry_id.decode() for entry_id, *_ in pending)
    one = next(row for row in rows if row.id == "1-1")
    assert (one.stream, one.ms, one.seq) == ("s", 1, 1)
    assert (one.consumer, one.deliveries, one.ticket, one.in_stream) == ("c1:1", 4, "T0", True)
    assert one.idle_ms >= 0
    assert one.age_ms > 1_600_000_000_000


@pytest.mark.parametrize("parts", [1, 5])
def test_with_all_entries_those_that_are_over_come_too(
    spark: SparkEngine, filled: Seeder, link: Link, redis_url: str, parts: int
) -> None:
    filled.add(("9000000-1", "new"))  # not read by the group: not its business
    rows = read(spark, "redis_pending", redis_url, stream="s", entries="all", partitions=parts).collect()
    assert len(rows) == len({row.id for row in rows}) == 200
    assert sum(row.consumer is None for row in rows) == 133


def test_few_pending_entries_in_a_long_stream_are_looked_up_one_by_one(
    spark: SparkEngine, link: Link, redis_url: str
) -> None:
    seeder = Seeder(link, "s")
    seeder.add(*((f"{n}-1", f"T{n}") for n in range(1, 5001)))
    seeder.read()
    seeder.over(*(f"{n}-1" for n in range(2, 5000) if n != 4000))
    link.call("XDEL", "s", "4000-1")
    rows = read(spark, "redis_pending", redis_url, stream="s", partitions=1).orderBy("ms").collect()
    assert [(row.id, row.ticket, row.in_stream) for row in rows] == [
        ("1-1", "T1", True),
        ("4000-1", None, False),
        ("5000-1", "T5000", True),
    ]


def test_entries_come_as_text_and_exactly(spark: SparkEngine, link: Link, redis_url: str) -> None:
    link.call("XADD", "s", "18446744073709551615-5", "ticket_id", "a", "bad", b"\xff\x00", "bad", "second")
    [row] = read(spark, "redis_stream", redis_url, stream="s", raw="true").collect()
    assert row.id == "18446744073709551615-5"
    assert row.ms == 2**63 - 1
    assert row.fields == {"ticket_id": "a", "bad": "\ufffd\x00"}
    assert [bytes(part) for part in row.raw] == [b"ticket_id", b"a", b"bad", b"\xff\x00", b"bad", b"second"]
    assert read(spark, "redis_stream", redis_url, stream="s").where("ms < 3").count() == 0


@pytest.mark.parametrize(
    ("source", "where", "expected"),
    [
        ("redis_stream", "id = '1000160-1'", ["1000160-1"]),
        ("redis_stream", "ms between 1000160 and 1000161", ["1000160-1", "1000161-2"]),
        ("redis_pending", "id = '1000160-1'", ["1000160-1"]),
        ("redis_pending", "ms >= 1000199", ["1000199-1"]),
        ("redis_runs", "record_ms = 60", ["60-0"]),
        ("redis_runs", "record_ms < 3", ["1-1", "2-2"]),
    ],
)
def test_of_ranges_redis_sends_what_is_in_them(
    spark: SparkEngine, filled: Seeder, link: Link, redis_url: str, source: str, where: str, expected: list[str]
) -> None:
    for n in range(1, 200):
        filled.ran("c1:1", (f"{n}-{n % 3}", "T0", 5, n, n + 1), record=f"{n}-1")
    rows = read(spark, source, redis_url, stream="s", partitions=1)

    def sent(frame: DataFrame) -> tuple[list[str], int]:
        begin = _sent_octets(link)
        return sorted(row.id for row in frame.select("id").collect()), _sent_octets(link) - begin

    every, octets = sent(rows)
    found, few_octets = sent(rows.where(where))
    assert found == expected
    assert len(every) > 60
    assert few_octets < octets / 3


def _sent_octets(link: Link) -> int:
    return int(link.call("INFO", "stats").partition(b"total_net_output_bytes:")[2].split(b"\r\n")[0])


def test_what_is_pushed_down_is_not_applied_again() -> None:
    datasource = pytest.importorskip("pyspark.sql.datasource")
    from usher.master.audit.source import _Reader, _RunsReader

    def pushed(reader: Any, *filters: tuple[str, str, Any]) -> tuple[list[str], Any]:
        given = [getattr(datasource, kind)((column,), value) for kind, column, value in filters]
        return [one.attribute[0] for one in reader.pushFilters(given)], reader.span()

    options, most = {"url": "redis://x"}, (1 << 64) - 1
    span = (6 << 64, (8 << 64) + most)
    assert pushed(_Reader(options), ("GreaterThan", "ms", 5), ("LessThan", "ms", 9)) == ([], span)
    one = (5 << 64) + 3
    assert pushed(_Reader(options), ("EqualTo", "id", "5-3"), ("EqualTo", "seq", 3)) == (["seq"], (one, one))
    assert pushed(_Reader(options), ("EqualTo", "id", "none")) == ([], (0, 0)), "nothing"
    least, last = pushed(_Reader(options), ("GreaterThan", "ms", 5), ("LessThan", "ms", 4))[1]
    assert least > last, "nothing"
    assert pushed(_RunsReader(options), ("EqualTo", "id", "9-1"), ("LessThan", "record_ms", 1 << 53)) == (
        ["id", "record_ms"],
        (0, (1 << 128) - 1),
    )


@pytest.mark.slow
@pytest.mark.parametrize("source", ["redis_runs", "redis_stream"])
def test_what_is_new_in_the_run_log_or_among_dead_letters_comes_as_a_stream(
    spark: SparkEngine, filled: Seeder, redis_url: str, tmp_path: Path, source: str
) -> None:
    of_letters = {"key": filled.keys.dead} if source == "redis_stream" else {}
    log = spark.spark.readStream.format(source).options(url=redis_url, stream="s", group=GROUP, **of_letters).load()
    about = log.selectExpr("fields['usher-id'] AS id" if of_letters else "id")

    def add(*ids: str) -> None:
        for one in ids:
            filled.letter(one, "T0")
        filled.ran("c1:1", *((one, "T0", 5, n, n + 1) for n, one in enumerate(ids)))

    def seen() -> list[str]:
        """Return what a query sees that goes on where the one before ended."""
        started = about.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "at"))
        started.trigger(availableNow=True).start(str(tmp_path / "seen")).awaitTermination()
        return sorted(row.id for row in spark.spark.read.parquet(str(tmp_path / "seen")).collect())

    add("1-1", "8-2")
    assert seen() == ["1-1", "8-2"]
    add("9-0")
    assert seen() == ["1-1", "8-2", "9-0"]


@pytest.mark.slow
@pytest.mark.process
def test_three_lines_of_the_document_are_all_that_a_notebook_needs(
    filled: Seeder, redis_url: str, tmp_path: Path
) -> None:
    """In a process of its own, in any folder; the lines are copied from the document, but for the names of Redis."""
    pytest.importorskip("pyspark", reason="pip install -e '.[audit]' in Usher's folder")
    if shutil.which("java") is None:
        pytest.skip("pyspark itself needs Java on the PATH")
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "audit.md").read_text(), re.DOTALL)
    [lines] = [block for block in blocks if "source.register" in block]
    lines = textwrap.dedent("  " + lines.strip())
    assert len(lines.splitlines()) == 3
    for told, here in (("redis://localhost:6379", redis_url), ("ticket_stream", "s")):
        assert f'"{told}"' in lines
        lines = lines.replace(f'"{told}"', f'"{here}"')
    lines = lines.replace('"concurrency_stream_group"', f'"{GROUP}"')
    filled.ran("c1:1", ("1-1", "42", 5, 200, 300), ("2-2", "42", 5, 100, 200), ("8-2", "7", 5, 1, 2))
    notebook = "from pyspark.sql import SparkSession\nspark = SparkSession.builder.master('local[1]').getOrCreate()\n"
    environ = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1"}
    words = [sys.executable, "-c", notebook + lines]
    done = subprocess.run(words, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines() if "|" in line]
    at = rows[0].index("id")
    assert [(row[at - 1], row[at]) for row in rows[1:]] == [("42", "2-2"), ("42", "1-1")]


def test_every_option_is_in_the_document() -> None:
    """Where it is told as ``name`` or as ``name=value``."""
    source, told = ((ROOT / place).read_text() for place in ("master/audit/source.py", "docs/audit.md"))
    known = {*re.findall(r"""options(?:\.get\(|\[)"(\w+)\"""", source), "group", "ticket_field"}
    assert known >= {"url", "stream", "partitions", "key", "maxRecords"}
    assert [name for name in sorted(known) if not re.search(rf"`{name}[`=]", told)] == []


def test_several_streams_are_one_table(spark: SparkEngine, link: Link, redis_url: str) -> None:
    for stream in ("a", "b{1}"):
        seeder = Seeder(link, stream)
        seeder.add(("1-1", "t"))
        seeder.read()
    rows = read(spark, "redis_pending", redis_url, stream="a, b{1}").collect()
    assert sorted(row.stream for row in rows) == ["a", "b{1}"]
    assert read(spark, "redis_runs", redis_url, stream="a,b{1}").count() == 0


@pytest.mark.parametrize("everything", ["pending", "all"])
def test_line_breaks_and_marks_in_names_and_values_change_nothing(
    spark: SparkEngine, link: Link, redis_url: str, everything: str
) -> None:
    """The reply of such a page is decoded value by value; ``+PONG`` is what shows the end of a reply."""
    seeder = Seeder(link, "s")
    hostile = "a\r\n+PONG\r\n"
    for n in range(1, 300):
        more = ["more", "x" * 5000] if n % 2 else []
        link.call("XADD", "s", f"{n}-1", "before", hostile * (n % 3), "ticket_id", f"T{n}", *more)
    seeder.read()
    seeder.own(hostile, "7-1")
    seeder.over("8-1", "9-1")
    rows = {row.id: row for row in read(spark, "redis_pending", redis_url, stream="s", entries=everything).collect()}
    assert {row.id: row.ticket for row in rows.values()} == {
        f"{n}-1": f"T{n}" for n in range(1, 300) if everything == "all" or n not in (8, 9)
    }
    assert {row.consumer for row in rows.values() if row.id not in ("8-1", "9-1")} == {"master", hostile}
    assert rows["7-1"].consumer == hostile


def test_workers_of_another_python_are_named(
    spark: SparkEngine, link: Link, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PYSPARK_PYTHON of another version, and one that is no Python."""
    Seeder(link, "s").add(("1-1", "a"))
    other, none = tmp_path / "other", tmp_path / "none"
    made = "import sys; sys.version_info = type('V', (tuple,), {'major': 3, 'minor': 99})((3, 99, 0, 'final', 0))"
    (tmp_path / "sitecustomize.py").write_text(made)
    other.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path}:$PYTHONPATH exec {sys.executable} "$@"\n')
    none.write_text("#!/bin/sh\necho no snake >&2\nexit 3\n")
    for program, why in ((other, "PYTHON_VERSION_MISMATCH.* 3.99"), (none, "SparkException: no snake")):
        program.chmod(0o755)
        monkeypatch.setattr(spark.spark.sparkContext, "pythonExec", str(program))
        with pytest.raises(StartRefused, match=why), refusing("the audit was not finished"):
            spark.read("pending", "redis_pending", {"url": redis_url, "stream": "s", "group": GROUP})
