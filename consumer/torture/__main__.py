"""The harness as a process of its own: ``usher torture-stage``. It gets a request on standard input and writes results
to a descriptor of its own, not to standard output, which belongs to the handler and its prints."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import Any

import click
import orjson

from usher.common.redis.client import Link
from usher.consumer.torture.child import HandlerSpec
from usher.consumer.torture.harness import HandlerUntestable, Harness, TortureLimits

_PR_SET_PDEATHSIG = 1


@click.command(name="torture-stage")
@click.argument("told_to", type=int)
def main(told_to: int) -> None:
    """Run all scenarios for the request on standard input; write results to the file descriptor ``told_to``."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    sys.path.append(str(Path.cwd()))  # the folder of the handler's project
    request = orjson.loads(sys.stdin.buffer.read())
    os.set_inheritable(told_to, False)

    def say(**told: Any) -> None:
        os.write(told_to, orjson.dumps(told) + b"\n")

    link = Link(request["redis_url"], "usher:torture")
    try:
        stage = Harness(HandlerSpec(**request["play"]), link, request["fields"], TortureLimits(**request["limits"]))
        findings = stage.tell_all(lambda name, told, count: say(scenario=name, told=told, count=count))
    except HandlerUntestable as why:
        say(cannot=str(why))
    else:
        say(findings=[finding.document() for finding in findings])
    finally:
        link.close()
