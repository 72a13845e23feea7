"""Start and end the processes of a torture run, a Redis and the harness, for the command and for pytest."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import orjson

from usher.common.base.errors import StartRefused
from usher.common.redis.embedded import EmbeddedRedis
from usher.common.runtime.own_command import usher_command
from usher.consumer.torture.child import HandlerSpec
from usher.consumer.torture.findings import CaseFailure, ScenarioResult
from usher.consumer.torture.harness import TortureLimits

_LOOK_EVERY_S = 0.2
Progress = Callable[[str, int, int], None]


def run_torture(
    play: HandlerSpec,
    fields: Sequence[Mapping[str, str]],
    limits: TortureLimits,
    environ: Mapping[str, str],
    progress: Progress,
    check: Callable[[], None],
) -> list[ScenarioResult]:
    """Run all scenarios, and return the results. It calls ``check`` meanwhile, which may raise. Raises StartRefused
    when nothing can be said about the handler."""
    with tempfile.TemporaryDirectory(prefix="usher-torture-", dir="/tmp" if Path("/tmp").is_dir() else None) as name:
        folder = Path(name)
        with EmbeddedRedis(folder, port=None, durable=False) as server:
            request = {"redis_url": server.url, "play": asdict(play), "fields": list(fields), "limits": asdict(limits)}
            (folder / "request").write_bytes(orjson.dumps(request))
            return _staged(folder, dict(environ) | {"USHER_REDIS_URL": server.url}, progress, check)


def _staged(
    folder: Path, environ: Mapping[str, str], progress: Progress, check: Callable[[], None]
) -> list[ScenarioResult]:
    reader, writer = os.pipe()
    with (
        (folder / "request").open("rb") as request,
        (folder / "log").open("wb") as log,
        os.fdopen(reader, "rb", buffering=0) as told,
    ):
        process = subprocess.Popen(
            usher_command("torture-stage", str(writer)),
            stdin=request,
            stdout=log,
            stderr=log,
            env=dict(environ),
            pass_fds=(writer,),
            start_new_session=True,
        )
        os.close(writer)
        try:
            for line in _lines(told, check):
                document: dict[str, Any] = orjson.loads(line)
                if "findings" in document:
                    return [_finding(each) for each in document["findings"]]
                if "cannot" in document:
                    raise StartRefused(f"nothing can be said about this handler: {document['cannot']}")
                progress(document["scenario"], document["told"], document["count"])
            raise StartRefused(
                "the torture process ended by itself; its last output:\n"
                f"{(folder / 'log').read_text(errors='replace')[-2000:]}"
            )
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)  # its child processes are in its group, frozen ones too
            except ProcessLookupError:
                pass
            process.wait()


def _lines(told: IO[bytes], check: Callable[[], None]) -> Iterator[bytes]:
    """Yield whole lines as they come; a Ctrl-C is noticed while there are none."""
    rest = b""
    while True:
        check()
        if not select.select([told], [], [], _LOOK_EVERY_S)[0]:
            continue
        chunk = told.read(65_536)
        if not chunk:
            return
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines


def _finding(document: dict[str, Any]) -> ScenarioResult:
    document.pop("safe")
    failures = [CaseFailure(**{**failure, "notes": tuple(failure["notes"])}) for failure in document.pop("failures")]
    return ScenarioResult(**document, failures=failures)
