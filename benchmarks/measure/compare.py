"""The measurement of ``python -m benchmarks compare``: one peer, or Usher, on a workload that is all there before the
clock starts."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.peer import Peer
from benchmarks.rig import servers
from benchmarks.rig.findings import judge
from benchmarks.rig.program import BenchProcess
from benchmarks.rig.recording import FOLDER_VARIABLE, PeerJob, count_notes, read_notes
from benchmarks.rig.system import Rig
from usher.deploy.bench import rig as machine
from usher.deploy.bench.rig import STREAM, BenchFailed, zipf_tickets

_SEED = 1
_PROCESSES = 2
_POLL_S = 0.05
_FILLED_WITHIN_S = 900.0
_READY_WITHIN_S = 60.0
_FIRST_WITHIN_S = 60.0
_STALLED_S = 15.0
#: Seconds to wait after the last message, because repeats may come a little later.
_LINGER_S = 0.5
_PAGE = 1000
#: The default lease: the rig's lease of a second is lost for a moment on a loaded machine.
_AS_SHIPPED = {"USHER_LEADER_LEASE_SECONDS": "5"}
_PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class Workload:
    """The workload, the same for all, except for the peers' own ``share`` of the messages."""

    messages: int
    tickets: int
    payload: int  # bytes
    at_most_s: float  # then the clock is stopped

    def part(self, share: float) -> list[int]:
        """Return the ticket of each message."""
        names = zipf_tickets(max(1, int(self.messages * share)), self.tickets, _SEED)
        return [int(name[1:]) for name in names]


@dataclass(frozen=True)
class Installed:
    """The place of a peer's installation."""

    version: str
    python: str
    server: str  # its program; "" when we provide it


def find(peer: Peer, environments: Path | None) -> Installed | str:
    """Return the interpreter that has the peer's library, and its server; or a text that names what is missing."""
    own = [] if environments is None else [str(environments.absolute() / peer.environment / "bin" / "python")]
    for python in (*own, sys.executable):
        version = _version(python, peer.distribution)
        if version:
            server = servers.find(peer.server, python)
            return servers.HOW_TO_INSTALL[peer.server] if server is None else Installed(version, python, server)
    return f"{peer.distribution} is not installed (--environments DIR --prepare does it)"


def _version(python: str, distribution: str) -> str:
    ask = f"import importlib.metadata as m; print(m.version({distribution!r}))"
    try:
        return subprocess.run(
            [python, "-c", ask], capture_output=True, text=True, check=True, timeout=60
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def prepare(peer: Peer, environments: Path) -> None:
    """Make the peer's virtual environment and install its newest versions. Raises BenchFailed."""
    folder = environments.absolute() / peer.environment
    for words in (
        [sys.executable, "-m", "venv", str(folder)],
        [str(folder / "bin" / "pip"), "install", "--quiet", "--upgrade", *peer.requires],
    ):
        if subprocess.run(words, stdout=sys.stderr, check=False).returncode:
            raise BenchFailed(f"{' '.join(words[-len(peer.requires) :])} cannot be installed in {folder}")


def run_peer(peer: Peer, installed: Installed, workload: Workload, environ: Mapping[str, str]) -> dict[str, Any]:
    """Run a peer once. Raises BenchFailed."""
    tickets = workload.part(peer.share)
    with _folder() as folder:
        own = _environ(folder, environ)
        with servers.running(peer.server, installed.server, folder, own) as server:
            PeerJob(str(folder), server.url, len(tickets), workload.payload, peer.processes, peer.concurrency).save(
                tickets
            )
            words = [installed.python, "-m", "benchmarks.peers", peer.name]
            with BenchProcess("fill", [*words, "fill"], folder, own) as filling:
                told = filling.answer(_FILLED_WITHIN_S)
            with contextlib.ExitStack() as stack:
                crew = [
                    stack.enter_context(BenchProcess(f"worker-{n}", [*words, "work", str(n)], folder, own))
                    for n in range(peer.processes)
                ]
                for worker in crew:
                    worker.answer(_READY_WITHIN_S)
                before = _cpu_seconds(server, crew)
                for worker in crew:
                    worker.tell()
                cut = _wait(folder, len(tickets), workload.at_most_s, lambda: _check(crew))
                cpu_s = _cpu_seconds(server, crew) - before
        return {"server": told, **_result(folder, tickets, cut, cpu_s)}


def _cpu_seconds(server: servers.Server, crew: list[BenchProcess]) -> float:
    return sum(machine.cpu_seconds(pid) for pid in (server.pid, *(worker.pid for worker in crew)))


def _check(crew: list[BenchProcess]) -> None:
    for worker in crew:
        worker.check()


def run_usher(workload: Workload, environ: Mapping[str, str]) -> dict[str, Any]:
    """Run a master and two consumers once, as ``usher bench throughput`` starts them. Raises BenchFailed."""
    tickets = workload.part(1.0)
    with _folder() as folder, Rig(True, environ) as rig:
        job = PeerJob(str(folder), "", len(tickets), workload.payload, _PROCESSES, 0)
        job.save(tickets)
        last_id = _fill_usher(rig, job)
        rig.stream.create_group(b"0-0")
        rig.start_programs(
            _PROCESSES, "benchmarks.programs.handlers:recorded", {FOLDER_VARIABLE: str(folder), **_AS_SHIPPED}
        )
        before = sum(rig.cpu().values())
        rig.release()
        cut = _wait(folder, len(tickets), workload.at_most_s, rig.check)
        if not cut:
            rig.wait_until_done(last_id, _STALLED_S)
        cpu_s = sum(rig.cpu().values()) - before
        return {"server": rig.redis_version(), **_result(folder, tickets, cut, cpu_s)}


def _fill_usher(rig: Rig, job: PeerJob) -> bytes:
    last, messages, body = b"", list(job.workload()), job.body
    for at in range(0, len(messages), _PAGE):
        page = messages[at : at + _PAGE]
        for reply in rig.link.pipeline(
            [("XADD", STREAM, "*", "ticket_id", ticket, "number", number, "body", body) for ticket, number in page]
        ):
            if isinstance(reply, Exception):
                raise reply
            last = reply
    return last


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="usher-bench-"))
    try:
        # The peers' interpreters find the benchmarks here, and nothing else of Usher's environment.
        (folder / "lib").mkdir()
        (folder / "lib" / "benchmarks").symlink_to(_PACKAGE, target_is_directory=True)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _environ(folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    kept = {
        name: value
        for name, value in environ.items()
        if not name.startswith(("USHER_", "PYTHON", "RABBITMQ_", "CELERY_"))
    }
    return kept | {"PYTHONPATH": str(folder / "lib"), "PYTHONDONTWRITEBYTECODE": "1", FOLDER_VARIABLE: str(folder)}


def _wait(folder: Path, messages: int, at_most_s: float, check: Callable[[], None]) -> str:
    """Wait until all messages are noted; return the reason where the clock was stopped before."""
    started = changed = time.monotonic()
    first, seen = 0.0, 0
    while seen < messages:
        time.sleep(_POLL_S)
        check()
        now, before = time.monotonic(), seen
        seen = count_notes(folder)
        if seen != before:
            changed, first = now, first or now
        if not seen and now - started > _FIRST_WITHIN_S:
            raise BenchFailed(f"no message was handled in {_FIRST_WITHIN_S:.0f} s")
        if seen and now - first > at_most_s:
            return f"stopped after {at_most_s:.0f} s"
        if seen and now - changed > _STALLED_S:
            return f"nothing came for {_STALLED_S:.0f} s"
    time.sleep(_LINGER_S)
    return ""


def _result(folder: Path, tickets: list[int], cut: str, cpu_s: float) -> dict[str, Any]:
    verdict = judge(read_notes(folder), tickets)
    counted = asdict(verdict) | {"seconds": round(verdict.seconds, 3)}
    if cut.startswith("stopped"):
        counted["lost"] = None  # unknown
    figures = {
        "messages_per_second": round(verdict.per_second, 1),
        "cpu_us_per_message": round(cpu_s * 1e6 / max(1, verdict.handled), 1),
    }
    return {"messages": len(tickets), "cut": cut, **figures, **counted}
