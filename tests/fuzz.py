"""The master's API, fuzzed by schemathesis out of its own OpenAPI document: ``python -m tests.fuzz --cases 500``.

A real master on a real Redis, with a consumer's registration, tickets in processing and dead letters to be found. Each
operation gets ``--cases`` cases with a token of all rights, and as many without any: answers must be those that the
document tells, and never 500.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import requests

from tests.process.crew import KEYS, Crew
from tests.process.machine import until
from usher.common.redis.client import Link
from usher.common.redis.embedded import EmbeddedRedis

TOKEN = "t-all"
#: Subscriptions do not end.
_ENDLESS = r"/events$"
_ALWAYS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "allow_header_conformance",
)
_WITH_TOKEN = ("negative_data_rejection", "unsupported_method", "ignored_auth")

#: Ours refuse what is too long before they look at it.
_CONFIGURATION = """
[checks.negative_data_rejection]
expected-statuses = [400, 401, 403, 404, 405, 406, 409, 410, 411, 413, 414, 415, 421, 422, 431]

# Not OPTIONS: behind a ticket's id that ends like a verb's route, GET is allowed, too.
[phases.coverage]
unexpected-methods = ["get", "put", "post", "delete", "patch", "trace"]
"""


@contextmanager
def fuzzed_master(folder: Path, redis_url: str) -> Iterator[str]:
    """The URL of a master that leads, with something to find behind it."""
    with Crew(folder, redis_url, USHER_API_TOKEN=TOKEN, USHER_LEASE_SECONDS="3600") as crew:
        crew.start_master()
        [url] = crew.masters
        until(lambda: _leads(url), 30, "the master leads")
        _fill(redis_url, url)
        yield url


def _leads(url: str) -> bool:
    try:
        return bool(requests.get(f"{url}/api/health", timeout=5).json().get("leader"))
    except requests.RequestException:
        return False


def _fill(redis_url: str, url: str) -> None:
    """A consumer that never works, tickets in its hands, and dead letters."""
    registration = {"name": "a", "health_url": "http://127.0.0.1:1/", "slots": 8, "capacity": 100}
    registered = requests.post(f"{url}/api/consumers/register", json=registration, headers=_headers(True), timeout=10)
    assert registered.status_code == 201
    link = Link(redis_url, "fuzz")
    link.call("DEL", KEYS.unproven(registered.json()["incarnation"]))  # as its first renewal does
    link.pipeline([("XADD", KEYS.stream, "*", "ticket_id", f"T{number % 7}", "text", "x") for number in range(30)])
    link.pipeline([("XADD", KEYS.stream, "*", "no", "ticket") for _ in range(10)])
    until(lambda: link.call("HLEN", KEYS.tickets) == 7 and link.call("XLEN", KEYS.dead) == 10, 30, "all is handed over")
    link.close()


def _headers(with_token: bool) -> dict[str, str]:
    return {"Authorization": f"Bearer {TOKEN}"} if with_token else {}


def fuzz(
    url: str, folder: Path, cases: int, with_token: bool, seed: int = 1, phases: str = "examples,coverage,fuzzing"
) -> subprocess.CompletedProcess[str]:
    """One run over all operations; exit code 0: nothing was found."""
    document = folder / "openapi.json"
    document.write_text(json.dumps(requests.get(f"{url}/api/openapi.json", headers=_headers(True), timeout=10).json()))
    (folder / "schemathesis.toml").write_text(_CONFIGURATION)
    checks = _ALWAYS + (_WITH_TOKEN if with_token else ())
    words = [
        "run",
        str(document),
        "--url",
        url,
        "-n",
        str(cases),
        "--seed",
        str(seed),
        "--checks",
        ",".join(checks),
        "--continue-on-failure",
    ]
    words += [
        "--phases",
        phases,
        "--exclude-path-regex",
        _ENDLESS,
        "--request-timeout",
        "30",
        "--suppress-health-check",
        "all",
    ]
    words += ["--generation-database", "none", "--warnings", "off"]
    words += [word for name, value in _headers(with_token).items() for word in ("--header", f"{name}: {value}")]
    return subprocess.run(
        [sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()", *words],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip


def told(done: subprocess.CompletedProcess[str]) -> str:
    """What was found, without the bodies of a megabyte."""
    return "\n".join(line[:2000] for line in (done.stdout + done.stderr).splitlines())[-30_000:]


def main() -> int:
    """Both runs; 1 when something was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=500, help="cases for each operation and each of the two runs")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="usher-")))
        server = stack.enter_context(EmbeddedRedis(folder / "redis", port=None, durable=False))
        url = stack.enter_context(fuzzed_master(folder, server.url))
        found = False
        for with_token in (True, False):
            began_s = time.monotonic()
            done = fuzz(url, folder, given.cases, with_token, given.seed)
            found |= done.returncode != 0
            who = "with" if with_token else "without"
            sys.stdout.write(
                f"{told(done)}\n{who} a token: exit code {done.returncode}, {time.monotonic() - began_s:.0f} s\n"
            )
    return int(found)


if __name__ == "__main__":
    sys.exit(main())
