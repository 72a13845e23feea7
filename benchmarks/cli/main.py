"""``python -m benchmarks``: every figure that README and MEASURED.md name, each against a yardstick of the same run."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import click
import orjson
from rich.console import Console
from rich.table import Column, Table

from benchmarks.measure import fairness as measure_fairness
from benchmarks.measure import growth as measure_growth
from benchmarks.measure import hot as measure_hot
from benchmarks.measure import idle as measure_idle
from benchmarks.measure import outage as measure_outage
from benchmarks.measure import rebalance as measure_rebalance
from benchmarks.measure import router as router_bench
from benchmarks.measure import run as measure_run
from benchmarks.measure import scale as measure_scale
from benchmarks.measure import soak as measure_soak
from benchmarks.rig.system import leaving_no_program
from usher.cli import load_command
from usher.deploy.bench import rig as machine
from usher.deploy.bench.rig import (
    CONSUMERS,
    JSON,
    PAYLOAD,
    RUNS,
    VOLATILE,
    BenchFailed,
    latency,
    print_table,
    report,
    throughput,
)

#: Measures in modules of their own, imported when called.
_ELSEWHERE = {
    "audit": "benchmarks.cli.audit:audit",
    "compare": "benchmarks.cli.compare:compare",
    "consumers": "benchmarks.cli.consumers:consumers",
    "page": "benchmarks.cli.page:page",
    "prove": "benchmarks.proof.cli:prove",
    "strangers": "benchmarks.cli.strangers:strangers",
}


class _Benchmarks(click.Group):
    """The group of measures."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *_ELSEWHERE})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return load_command(_ELSEWHERE[cmd_name]) if cmd_name in _ELSEWHERE else super().get_command(ctx, cmd_name)


@click.group(
    cls=_Benchmarks,
    help=(
        "Measure this machine. Everything runs in a temporary folder with a Redis of its own; nothing that runs already"
        " is touched. USHER_REDIS_SERVER=/usr/bin/redis-server has it measured with that one."
    ),
)
@click.pass_context
def benchmarks(ctx: click.Context) -> None:
    ctx.with_resource(leaving_no_program())


benchmarks.add_command(throughput)
benchmarks.add_command(latency)


@benchmarks.command(
    help=(
        "Measure the effect on other tickets when one ticket gets a million messages: their waits alone, during the"
        " flood, and with the flood parked. With --rate-of-one how many messages of one ticket are handled per"
        " second, pipelined and strict (USHER_ACK_MODE)."
    )
)
@click.option(
    "--messages",
    type=click.IntRange(min=1000),
    help="Messages of the hot ticket. Default: 1,000,000, or 100,000 with --rate-of-one.",
)
@click.option(
    "--rate-of-one",
    is_flag=True,
    help="One ticket alone, all of it there before the clock starts; strict with a tenth of the messages.",
)
@click.option("--others", type=click.IntRange(min=1), default=1000, show_default=True, help="Other tickets.")
@click.option(
    "--rate",
    type=click.FloatRange(min=1),
    default=1000.0,
    show_default=True,
    help="Messages per second of the other tickets.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=1),
    default=10.0,
    show_default=True,
    help="Length of each of the three phases.",
)
@CONSUMERS
@RUNS
@VOLATILE
@JSON
def hot(
    messages: int | None,
    rate_of_one: bool,
    others: int,
    rate: float,
    seconds: float,
    consumers: int,
    runs: int,
    no_aof: bool,
    as_json: bool,
) -> None:
    if rate_of_one:
        count = messages or 100_000
        headline = ("messages_per_second", "strict_per_second")
        report(
            lambda: measure_hot.rate_of_one(count, count // 10, consumers, not no_aof, os.environ),
            runs,
            headline,
            as_json,
        )
        return
    report(
        lambda: measure_hot.hot(messages or 1_000_000, others, rate, seconds, consumers, not no_aof, os.environ),
        runs,
        ("baseline_p99_ms", "during_p99_ms", "p99_ms", "p99_ratio"),
        as_json,
    )


@benchmarks.command(
    help=(
        "Measure the gain of more slots and more processes. Handlers that wait 10 ms, on a thread each (wait) or as"
        " `async def` on one event loop (await): against what their slots can do at most, and beside as many slots that"
        " only wait. Handlers that compute for a millisecond, on one thread of each process: against the same in one"
        " process."
    )
)
@click.option(
    "--handlers",
    type=click.Choice(["wait", "await", "compute"]),
    default="wait",
    show_default=True,
    help="What the handlers do.",
)
@click.option(
    "--messages",
    type=click.IntRange(min=1000),
    help="Messages per run. Default: 400,000, or 30,000 where handlers compute.",
)
@click.option(
    "--consumers", type=click.IntRange(1, 32), help="Consumer processes. Default: 4, or 2 where handlers compute."
)
@click.option(
    "--slots", type=click.IntRange(1, 1024), default=64, show_default=True, help="Handlers of each that wait at a time."
)
@RUNS
@VOLATILE
@JSON
def scale(
    handlers: str, messages: int | None, consumers: int | None, slots: int, runs: int, no_aof: bool, as_json: bool
) -> None:
    settings = {"USHER_CONCURRENCY": str(slots)}

    def run() -> dict[str, Any]:
        if handlers == "compute":
            return measure_scale.computing(messages or 30_000, consumers or 2, settings, not no_aof, os.environ)
        return measure_scale.waiting(handlers, messages or 400_000, consumers or 4, settings, not no_aof, os.environ)

    shown = ("messages_per_second", "floor_per_second", "ratio")
    report(run, runs, shown if handlers == "compute" else (*shown, "bare_per_second", "bare_ratio"), as_json)


@benchmarks.command(
    help=(
        "Measure the cost of two masters and two consumers while nothing happens: commands of Redis and CPU per"
        " second, memory."
    )
)
@click.option(
    "--seconds", type=click.FloatRange(min=1), default=30.0, show_default=True, help="How long nothing happens."
)
@click.option("--masters", type=click.IntRange(1, 8), default=2, show_default=True, help="Master processes.")
@CONSUMERS
@click.option(
    "--runs", type=click.IntRange(1, 50), default=1, show_default=True, help="Runs; the headline figures are medians."
)
@VOLATILE
@JSON
def idle(seconds: float, masters: int, consumers: int, runs: int, no_aof: bool, as_json: bool) -> None:
    report(
        lambda: measure_idle.idle(seconds, masters, consumers, not no_aof, os.environ),
        runs,
        ("commands_per_second", "cpu_percent", "start_to_handled_seconds", "master_mib", "consumer_mib"),
        as_json,
    )


@benchmarks.command(
    "run",
    help=(
        "Measure `usher run`: memory, commands of Redis while nothing happens, start to first message, gap after"
        " `kill -9` of the leading one of three on this machine. RSS: of each"
        " of its two processes; PSS and USS: of both together."
    ),
)
@click.option("--seconds", type=click.FloatRange(min=1), default=30.0, show_default=True, help="Nothing happens.")
@click.option("--kills", type=click.IntRange(0, 1000), default=5, show_default=True, help="Of the leading one.")
@RUNS
@VOLATILE
@JSON
def run_(seconds: float, kills: int, runs: int, no_aof: bool, as_json: bool) -> None:
    memory = ("worker_rss_mib", "arbiter_rss_mib", "pss_mib", "uss_mib")
    headline = ("start_to_handled_seconds", "commands_per_second", "cpu_percent", *memory, "gap_ms", "longest_gap_ms")
    report(lambda: measure_run.run(seconds, kills, not no_aof, os.environ), runs, headline, as_json)


@benchmarks.command(
    help=(
        "Measure calls that are all in flight at once, from one process, beside as many callers that each wait at a"
        " list of their own (BLPOP); and the time from `message.progress` to a follower, here and over HTTP."
    )
)
@click.option("--calls", "count", type=click.IntRange(100, 50_000), default=10_000, show_default=True, help="At once.")
@click.option("--parts", type=click.IntRange(1, 10_000), default=200, show_default=True, help="Of each stream.")
@RUNS
@VOLATILE
@JSON
def calls(count: int, parts: int, runs: int, no_aof: bool, as_json: bool) -> None:
    kinds = [f"{kind}_{name}" for kind in ("call", "blpop") for name in ("connections", "more_mib", "p50_ms", "p99_ms")]
    streamed = ("part_p50_ms", "part_p99_ms", "http_part_p50_ms", "http_part_p99_ms")
    measure = importlib.import_module("benchmarks.measure.calls").calls  # needs redis-py's asyncio, and requests
    report(lambda: measure(count, parts, not no_aof, os.environ), runs, (*kinds, *streamed), as_json)


@benchmarks.command(
    help=(
        "Measure how fast consumers that join during a backlog take their share: against the time that all slots"
        " together need for what is left then."
    )
)
@click.option("--messages", type=click.IntRange(min=100), default=1600, show_default=True, help="One per ticket.")
@click.option(
    "--handler-seconds", type=click.FloatRange(0.001, 60), default=0.2, show_default=True, help="Of each message."
)
@click.option(
    "--slow-seconds", type=click.FloatRange(0, 600), default=0.0, show_default=True, help="Of every tenth message."
)
@click.option("--slots", type=click.IntRange(1, 1024), default=8, show_default=True, help="Handlers of each at a time.")
@click.option("--joining", type=click.IntRange(1, 32), default=3, show_default=True, help="Consumers that join.")
@click.option(
    "--after-seconds", type=click.FloatRange(0, 600), default=8.0, show_default=True, help="When they are started."
)
@RUNS
@VOLATILE
@JSON
def rebalance(
    messages: int,
    handler_seconds: float,
    slow_seconds: float,
    slots: int,
    joining: int,
    after_seconds: float,
    runs: int,
    no_aof: bool,
    as_json: bool,
) -> None:
    report(
        lambda: measure_rebalance.rebalance(
            messages, handler_seconds, slow_seconds, slots, joining, after_seconds, not no_aof, os.environ
        ),
        runs,
        ("seconds", "ideal_seconds", "ratio"),
        as_json,
    )


@benchmarks.command(
    help=(
        "Measure fairness behind a flood: the waits of a quiet tenant without tenants, in one stream, and with a stream"
        " each; what they cost the flood; the share of a tenant by its weight; and the wait of an urgent message."
    )
)
@click.option("--flood", type=click.IntRange(min=3000), default=12_000, show_default=True, help="Messages.")
@click.option(
    "--handler-seconds", type=click.FloatRange(0.001, 10), default=0.01, show_default=True, help="Of each message."
)
@click.option("--slots", type=click.IntRange(1, 1024), default=8, show_default=True, help="Handlers at a time.")
@click.option("--weight", type=click.IntRange(1, 100), default=3, show_default=True, help="Of one of two tenants.")
@RUNS
@VOLATILE
@JSON
def fairness(
    flood: int, handler_seconds: float, slots: int, weight: int, runs: int, no_aof: bool, as_json: bool
) -> None:
    report(
        lambda: measure_fairness.fairness(flood, handler_seconds, slots, weight, not no_aof, os.environ),
        runs,
        ("unfair_p99_ms", "p99_ms", "streams_p99_ms", "ratio", "streams_ratio", "share", "urgent_handler_times"),
        as_json,
    )


@benchmarks.command(
    help=(
        "Measure whether Redis' memory stays flat over days of load, and whether anything was cut that was needed: by a"
        " second group that is a day and a half behind, and a ticket that is halted from the second to the third day."
        " Days are short, and what the settings keep is as much less."
    )
)
@click.option("--days", type=click.FloatRange(5, 1000), default=6.0, show_default=True, help="How long.")
@click.option("--day-seconds", type=click.FloatRange(5, 86_400), default=60.0, show_default=True, help="Of each day.")
@click.option("--rate", type=click.FloatRange(min=1), default=300.0, show_default=True, help="Messages per second.")
@click.option("--streams", type=click.IntRange(1, 1000), default=3, show_default=True, help="Ticket streams.")
@VOLATILE
@JSON
def growth(days: float, day_seconds: float, rate: float, streams: int, no_aof: bool, as_json: bool) -> None:
    def run() -> dict[str, Any]:
        found = measure_growth.growth(days, day_seconds, rate, streams, not no_aof, os.environ)
        rows = found["samples"]
        shown = Table(*(Column(name.replace("_", " "), justify="right") for name in rows[0]))
        for row in rows:
            shown.add_row(*(f"{value:,}" for value in row.values()))
        Console(stderr=True).print(shown)
        return found

    report(run, 1, ("settled_mib", "last_mib", "ratio", "lost", "doubled", "out_of_order"), as_json)


@benchmarks.command(
    help=(
        "Measure an hour in which workers are killed again and again: what grows of the programs that live on, and of"
        " Redis; and what was lost, or ran out of order or beside another one."
    )
)
@click.option("--minutes", type=click.FloatRange(0.5, 10_000), default=60.0, show_default=True)
@click.option("--rate", type=click.FloatRange(1, 5000), default=120.0, show_default=True, help="Messages per second.")
@click.option("--kill-every", type=click.FloatRange(1, 3600), default=20.0, show_default=True, help="Seconds.")
@VOLATILE
@JSON
def soak(minutes: float, rate: float, kill_every: float, no_aof: bool, as_json: bool) -> None:
    report(
        lambda: measure_soak.soak(60 * minutes, rate, kill_every, not no_aof, os.environ),
        1,
        ("messages", "kills", "lost", "again", "out_of_order", "overlapping"),
        as_json,
    )


@benchmarks.command(
    help=(
        "Try an outage: what handlers need refuses connections for a while, for all or for one tenant of two. Dead"
        " letters, order, tries per minute, what others wait before and during it, and when work goes on after it."
    )
)
@click.option("--seconds", type=click.FloatRange(5, 3600), default=30.0, show_default=True, help="How long it is away.")
@click.option(
    "--tickets", type=click.IntRange(3, 1_000_000), default=200, show_default=True, help="Tickets it concerns."
)
@click.option(
    "--whom",
    type=click.Choice(["all", "one", "nobody", "none"]),
    default="one",
    show_default=True,
    help="All, or one tenant; to compare with: nobody, the same backlog without an outage, or none, the same load.",
)
@click.option("--tenants", is_flag=True, help="Name the tenant's field, so that tenants have turns.")
@CONSUMERS
@VOLATILE
@JSON
def outage(seconds: float, tickets: int, whom: str, tenants: bool, consumers: int, no_aof: bool, as_json: bool) -> None:
    headline = ("letters", "reordered", "probes_per_minute", "resumed_seconds", "caught_up_seconds")
    waits = ("others_p99_ms_before", "others_p99_ms_during", "others_p99_ms_after")
    report(
        lambda: measure_outage.outage(seconds, tickets, whom, tenants, consumers, not no_aof, os.environ),
        1,
        headline if whom == "all" else (*headline, *waits),
        as_json,
    )


_MODES = {"both": ("change-driven", "portable"), "change-driven": ("change-driven",), "portable": ("portable",)}


@benchmarks.command(
    help=(
        "Measure the time from XADD (when it was due) to a subscriber of the stream router, and what subscriptions"
        " cost, in both modes."
    )
)
@click.option(
    "--streams",
    type=click.IntRange(1, 2_000_000),
    multiple=True,
    default=(1_000, 10_000, 100_000),
    show_default=True,
    help="Streams.",
)
@click.option(
    "--rate",
    type=click.FloatRange(min=1),
    default=1000.0,
    show_default=True,
    help="Entries per second, to streams at random.",
)
@click.option("--seconds", type=click.FloatRange(min=1), default=10.0, show_default=True, help="Length of a run.")
@click.option(
    "--idle-seconds",
    type=click.FloatRange(min=1),
    default=10.0,
    show_default=True,
    help="Seconds of idle time before it.",
)
@click.option(
    "--mode",
    type=click.Choice(list(_MODES)),
    default="both",
    show_default=True,
    help="How the router learns of entries.",
)
@JSON
def router(
    streams: tuple[int, ...], rate: float, seconds: float, idle_seconds: float, mode: str, as_json: bool
) -> None:
    document: dict[str, Any] = {"machine": machine.facts(""), "runs": []}
    try:
        for count in streams:
            click.echo(f"usher: {count:,} streams", err=True)
            document["runs"] += router_bench.measure(_MODES[mode], count, rate, seconds, idle_seconds)
    except BenchFailed as failed:
        click.echo(f"usher: {failed}", err=True)
        sys.exit(1)
    for run in document["runs"]:
        document["machine"]["redis"] = run.pop("redis")
    largest = max(document["runs"], key=lambda run: (run["streams"], run["mode"] == "change-driven"))
    document |= {name: largest[name] for name in ("p50_ms", "p99_ms", "max_ms")}
    wrong = sum(run["missed"] + run["doubled"] for run in document["runs"])
    if as_json:
        click.echo(orjson.dumps(document))
    else:
        _show_router(document)
    if wrong:
        click.echo(f"usher: {wrong} entries were missed or came twice", err=True)
        sys.exit(1)


def _show_router(document: dict[str, Any]) -> None:
    names = ("streams", "mode", "p50 ms", "p99", "max", "bound", "links", "bytes", "CPU s", "idle %")
    columns = (Column(name, justify="left" if name == "mode" else "right", no_wrap=True) for name in names)
    shown = Table(*columns, box=None, padding=(0, 1, 0, 0), header_style="bold")
    for run in document["runs"]:
        cpu, idle = run["cpu_seconds"], run["idle_cpu_percent"]
        times = [f"{run[name]:,.2f}" for name in ("p50_ms", "p99_ms", "max_ms")]
        cells = [
            "" if run[name] is None else f"{run[name]:,}"
            for name in ("formula_ms", "connections", "bytes_per_subscription")
        ]
        costs = (f"{cpu['router']} {cpu['redis']}", f"{idle['router']} {idle['redis']}")
        shown.add_row(f"{run['streams']:,}", run["mode"].removesuffix("-driven"), *times, *cells, *costs)
    print_table(shown, document["machine"])
    click.echo(
        "bound: what the portable mode promises; links: connections; bytes: memory per subscription; CPU, idle: router,"
        " Redis"
    )


@benchmarks.command(
    help=(
        "Measure rows per second from an outbox to the stream, and a bare XADD pipeline beside it; with --rate the"
        " time from a row's commit to the start of its handler. SQLite in a temporary folder, or an empty database of"
        " yours."
    )
)
@click.option("--rows", type=click.IntRange(min=1000), default=100_000, show_default=True, help="Rows per run.")
@click.option(
    "--rate", type=click.FloatRange(min=1), help="Commits per second: measure the time to the handler instead."
)
@click.option(
    "--seconds", type=click.FloatRange(min=1), default=10.0, show_default=True, help="Length of a run with --rate."
)
@click.option(
    "--sql",
    "sql_url",
    default="",
    help="An empty database, e.g. postgresql+psycopg://user@host/bench. Default: SQLite.",
)
@PAYLOAD
@RUNS
@VOLATILE
@JSON
def outbox(
    rows: int, rate: float | None, seconds: float, sql_url: str, payload: int, runs: int, no_aof: bool, as_json: bool
) -> None:
    module = importlib.import_module("benchmarks.measure.outbox")  # needs the extra `sql`
    if rate is None:
        headline: tuple[str, ...] = ("messages_per_second", "floor_per_second", "ratio")
        report(lambda: module.rows_per_second(rows, payload, sql_url, not no_aof, os.environ), runs, headline, as_json)
    else:
        headline = ("p50_ms", "p99_ms", "max_ms")
        report(lambda: module.latency(rate, seconds, payload, sql_url, not no_aof, os.environ), runs, headline, as_json)
