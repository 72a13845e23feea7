"""Options of a stream router's reading."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RouterOptions:
    """Options of a router's reading.

    ``worker_count``: most readers, and connections, of the portable mode; it has at least ``min_workers``, and as many
    as bring every stream's turn within ``round_millis``. ``xread_streams``: streams of one XREAD; ``xread_count``: most
    entries of each of them. ``xread_block_millis``: how long a reader of the portable mode waits for entries of its
    streams; None: not at all.

    ``sweep_seconds``: the change-driven mode looks at every stream once in this time, announced or not.
    ``check_seconds``: how often every stream is checked for having gone back (deleted and made again) without an
    announcement.

    Raises ValueError for values that make no sense.
    """

    worker_count: int = 4
    min_workers: int = 1
    xread_streams: int = 500
    xread_block_millis: int | None = 100
    xread_count: int = 100
    round_millis: int = 1000
    sweep_seconds: float = 60.0
    check_seconds: float = 600.0

    def __post_init__(self) -> None:
        wrong = [
            name for name in ("min_workers", "xread_streams", "xread_count", "round_millis") if getattr(self, name) < 1
        ]
        wrong += [name for name in ("sweep_seconds", "check_seconds") if getattr(self, name) <= 0]
        if self.worker_count < self.min_workers:
            wrong.append("worker_count")
        if self.xread_block_millis is not None and self.xread_block_millis < 1:
            wrong.append("xread_block_millis")
        if wrong:
            raise ValueError(f"RouterOptions: {', '.join(wrong)} must be greater")

    @property
    def block_s(self) -> float:
        """Return the longest wait of one turn of the portable mode, in seconds."""
        return (self.xread_block_millis or 0) / 1000
