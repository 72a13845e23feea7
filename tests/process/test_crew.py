"""What tests wait for is there when they go on."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.process.crew import KEYS, Crew
from usher import Link

pytestmark = pytest.mark.process


def test_nothing_is_settled_before_the_leader_has_read_it(folder: Path, redis_url: str, link: Link) -> None:
    """Pending list and index are empty then, as in the end."""
    with Crew(folder, redis_url) as crew:
        crew.start(1, ["c1"])
        leader = psutil.Process(crew.worker_of("master-1"))
        leader.suspend()
        while any(psutil.Process(one.id).status() != psutil.STATUS_STOPPED for one in leader.threads()):
            pass  # one may take a message yet
        sent = link.call("XADD", KEYS.stream, "*", "ticket_id", "T").decode()
        with pytest.raises(AssertionError, match="stream's end"):
            crew.wait_until_settled(link, within_s=0.3)
        leader.resume()
        crew.wait_until_settled(link)
        assert crew.handled() == {sent}
