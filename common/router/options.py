"""Options of a stream router's reading."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RouterOptions:
    """Options of a router's reading.

    ``worker_count``: readers, and connections, of the portable mode. ``xread_streams``: streams of one XREAD;
    ``xread_count``: most entries of each of them. ``xread_block_millis``: how long a reader of the portable mode waits
    for entries of its streams; None: not at all. There an entry waits until its stream's turn comes: with n streams up
    to n / ``xread_streams`` / ``worker_count`` times that long.

    ``sweep_seconds``: the change-driven mode looks at every stream once in this time, announced or not.
    ``check_seconds``: how often every stream is checked for having gone back (deleted and made again) without an
    announcement.

    Raises ValueError for values that make no sense.
    """

    worker_count: int = 4
    xread_streams: int = 500
    xread_block_millis: int | None = 100
    xread_count: int = 100
    sweep_seconds: float = 60.0
    check_seconds: float = 600.0

    def __post_init__(self) -> None:
        wrong = [name for name in ("worker_count", "xread_streams", "xread_count") if getattr(self, name) < 1]
        wrong += [name for name in ("sweep_seconds", "check_seconds") if getattr(self, name) <= 0]
        if self.xread_block_millis is not None and self.xread_block_millis < 1:
            wrong.append("xread_block_millis")
        if wrong:
            raise ValueError(f"RouterOptions: {', '.join(wrong)} must be greater")

    @property
    def block_s(self) -> float:
        return (self.xread_block_millis or 0) / 1000
