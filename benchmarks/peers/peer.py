"""The description of a peer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks.rig.recording import PeerJob


@dataclass(frozen=True)
class Peer:
    """A system on the same workload.

    ``fill`` adds all messages of a job, and returns the server's own version text where it is not Redis. ``worker``
    prepares one worker process and returns the function that runs it, until it is killed. Both run in the peer's own
    interpreter.
    """

    name: str
    title: str
    distribution: str  # the version that is shown; without it the peer is not installed
    requires: tuple[str, ...]  # what pip installs into its environment
    keeps: str  # scope of its order
    promise: str
    source: str  # where it says so
    configuration: str
    fill: Callable[[PeerJob], str | None]
    worker: Callable[[PeerJob], Callable[[], object]]
    processes: int = 2  # started ones; some start more of their own
    concurrency: int = 1  # messages that each may have in hand at a time
    share: float = 1.0  # of the other peers' messages: below 1 for slow ones
    server: str = "redis"

    @property
    def environment(self) -> str:
        """Return the folder of its virtual environment: variants share one."""
        return self.name.partition("-")[0]

    def alone(self, keeps: str, promise: str) -> Peer:
        """Return this peer with one worker that takes one message at a time."""
        return replace(
            self,
            name=f"{self.name}-alone",
            title=f"{self.title}, one worker",
            keeps=keeps,
            promise=promise,
            processes=1,
            concurrency=1,
            share=self.share / 4,
            configuration=f"{self.configuration}; but one process, one message at a time",
        )
