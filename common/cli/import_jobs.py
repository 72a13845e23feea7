"""``usher import``: show what waits in a queue of Celery, RQ or BullMQ, and with ``--take`` move it to the stream."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from typing import Any

import click

from usher.common.base.errors import NotNow, ReplyUnknown
from usher.common.base.json_text import json_line
from usher.common.base.text import escape_control, pluralize
from usher.common.redis.client import CommandRefused, Link, check_reachable
from usher.common.redis.locate import resolve_redis_url
from usher.common.runtime.settings import CommonSettings, load, options
from usher.common.sending.other_queues import LAYOUTS, WaitingJob, beside, remove, waiting
from usher.common.sending.producer import Producer

#: Seconds for which a job that was sent and not removed is known, should the import be run again.
_KNOWN_S = 86_400.0


@click.command(
    name="import",
    help=(
        "Show what waits in a queue of Celery, RQ or BullMQ, job by job importable or not and why; --take sends what is"
        " importable, in its order, and removes it there. Stop the old workers first. Exit code 1: something stays."
    ),
)
@click.argument("library", type=click.Choice(list(LAYOUTS)))
@click.option("--from", "source", metavar="URL", envvar="USHER_IMPORT_URL", help="Its Redis. Default: that of Usher.")
@click.option("--queue", required=True, metavar="NAME", help="The queue.")
@click.option(
    "--ticket",
    required=True,
    metavar="PATH",
    help="Where the ticket id is in the arguments: args.0 or kwargs.account (Celery, RQ), customer.id (BullMQ's data).",
)
@click.option("--take", is_flag=True, help="Import. Without this option nothing is changed.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@options(CommonSettings)
def import_jobs(
    flags: dict[str, Any], library: str, source: str | None, queue: str, ticket: str, take: bool, as_json: bool
) -> None:
    settings = load(CommonSettings, os.environ, flags)
    url = resolve_redis_url(settings)
    moving = _Moving(library, queue)
    with contextlib.ExitStack() as stack:
        links = []
        for place in (source or url, url):
            check_reachable(place)
            links.append(Link(place, "usher:import"))
            stack.callback(links[-1].close)
        old, new = links
        producer = Producer(new, settings.one_stream, settings.ticket_field, dedup_s=_KNOWN_S)
        try:
            for page in waiting(old, moving.layout, queue, ticket, lambda: moving.gone):
                moving.look(page)
                if take:
                    moving.take(old, producer, [job for job in page if job.message is not None])
            moving.beside = beside(old, moving.layout, queue)
        except (NotNow, ReplyUnknown, CommandRefused, ValueError) as trouble:
            moving.trouble = str(trouble)
    moving.show(take, as_json)
    sys.exit(1 if moving.trouble or moving.why or moving.beside or moving.lost else 0)


class _Moving:
    """Counts of what was found and done. ``gone``: removed from the old queue, or no longer in it; ``lost`` of these:
    a worker was faster, after the job had been sent."""

    def __init__(self, library: str, queue: str) -> None:
        self.layout, self.library, self.queue = LAYOUTS[library], library, queue
        self.importable = self.sent = self.repeated = self.gone = self.lost = 0
        self.kinds: Counter[str] = Counter()
        self.why: Counter[str] = Counter()
        self.beside: dict[str, int] = {}
        self.trouble = ""

    def look(self, page: list[WaitingJob]) -> None:
        for job in page:
            if job.message is None:
                self.why[job.why] += 1
            else:
                self.importable += 1
                self.kinds[str(job.message.fields["kind"])] += 1

    def take(self, old: Link, producer: Producer, jobs: list[WaitingJob]) -> None:
        """Send, then remove: what is between is sent again by the next import, and known."""
        answers = producer.send_many(job.message for job in jobs if job.message is not None)
        self.repeated += sum(one.repeated is True for one in answers)
        self.sent += sum(one.repeated is not True for one in answers)
        for job in jobs:
            self.lost += not remove(old, self.layout, self.queue, job)
            self.gone += 1

    def show(self, take: bool, as_json: bool) -> None:
        document = {
            "library": self.library,
            "queue": self.queue,
            "importable": self.importable,
            "kinds": dict(self.kinds),
            "sent": self.sent if take else None,
            "repeated": self.repeated,
            "taken_by_a_worker_too": self.lost,
            "stays": dict(self.why),
            "beside": self.beside,
            "error": self.trouble or None,
        }
        if as_json:
            click.echo(json_line(document))
            return
        jobs = pluralize(self.importable, "job")
        if take:
            known = f", {self.repeated} had been sent before" if self.repeated else ""
            click.echo(f"{jobs} of {escape_control(self.queue)}: {self.sent} sent{known}; {self.gone} are gone there")
        else:
            click.echo(f"{jobs} of {escape_control(self.queue)} can be imported; --take does it")
        for kind, number in self.kinds.most_common():
            click.echo(f"  {number:,} {escape_control(kind)}")
        for why, number in self.why.most_common():
            click.echo(f"{pluralize(number, 'job')} {'stays' if number == 1 else 'stay'}: {escape_control(why)}")
        for what, number in self.beside.items():
            click.echo(f"{pluralize(number, 'job')} {what}: not imported")
        if self.lost:
            click.echo(f"usher: a worker took {self.lost} of them meanwhile: they may run twice", err=True)
        if self.trouble:
            click.echo(f"usher: stopped: {escape_control(self.trouble)}; run it again", err=True)
