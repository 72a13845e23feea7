"""What a peer is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks.rig.recording import PeerJob


@dataclass(frozen=True)
class Peer:
    """A system on the same workload.

    ``fill`` adds all messages of a job, and returns what the server says that it is where that is not Redis. ``worker``
    makes one worker process ready and returns what runs it, until it is killed. Both run in the peer's own interpreter.
    """

    name: str
    title: str
    distribution: str  # the version that is shown; without it the peer is not installed
    requires: tuple[str, ...]  # what pip installs into its environment
    keeps: str  # order per what
    promise: str
    source: str  # where that stands
    configuration: str
    fill: Callable[[PeerJob], str | None]
    worker: Callable[[PeerJob], Callable[[], object]]
    processes: int = 2  # that are started; some start more of their own
    concurrency: int = 1  # messages that each may have in hand at a time
    share: float = 1.0  # of the messages of the others: for slow ones
    server: str = "redis"

    @property
    def environment(self) -> str:
        """Folder of its virtual environment: variants share one."""
        return self.name.partition("-")[0]

    def alone(self, keeps: str, promise: str) -> Peer:
        """The same with one worker that takes one message at a time."""
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
