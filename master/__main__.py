"""``python -m usher.master`` / ``usher master``: run one master."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from usher.common.base.errors import RedisTrouble
from usher.common.base.log import ERROR, WARNING, configure, event
from usher.common.doctor.collector import startup_findings
from usher.common.http.credentials import check_reach
from usher.common.http.serve import check_address, serve, server_tls
from usher.common.protocol.keys import Keys
from usher.common.redis.client import Link
from usher.common.redis.locate import check_at_start, resolve_redis_url
from usher.common.runtime.settings import load, options
from usher.master.assembly.program import MasterProgram
from usher.master.settings import MasterSettings


@click.command(
    help=(
        "Run a master: it reads the ticket stream and delegates every entry to a consumer. Start two: one leads, one"
        " stands by."
    )
)
@options(MasterSettings)
def main(flags: dict[str, Any]) -> None:
    settings = load(MasterSettings, os.environ, flags)
    configure("master", settings.log_level, settings.log_format, settings.secrets)
    check_reach(settings.bind, settings.api_token, settings.tokens_file)
    check_address(settings.bind, "USHER_BIND")
    redis_url = resolve_redis_url(settings)
    check_at_start(redis_url, {"USHER_LEADER_LEASE_SECONDS": settings.leader_lease_seconds})
    log_doctor_findings(redis_url, Keys(settings.work_stream, settings.group))
    tls = server_tls(settings.tls_cert, settings.tls_key)
    import usher.master.assembly.facing  # noqa: F401 - before the fork; `usher run` does without, and shares this module

    serve(lambda: MasterProgram(settings, redis_url), settings.bind, "master", graceful_s=10.0, tls=tls)


def log_doctor_findings(redis_url: str, keys: Keys) -> None:
    """Log what ``usher doctor`` reports as bad about this Redis. Nothing is refused for it: the operator may know
    better, and a system that works badly is of more use than one that does not start."""
    try:
        with Link(redis_url, "master:doctor", timeout_s=3.0) as link:
            for finding in startup_findings(link, keys):
                event(
                    "redis_check_failed",
                    level=ERROR,
                    check=finding.check,
                    seen=finding.seen,
                    means=finding.means,
                    do=finding.do,
                )
    except RedisTrouble as trouble:
        event("redis_check_skipped", level=WARNING, why=str(trouble))


if __name__ == "__main__":
    from usher.cli import run

    sys.exit(run(group=main))
