"""A stream as after the clock of Redis was set back: its entries were delivered at a time that is still to come. No
command makes that."""

from __future__ import annotations

from tests.hands import pairs
from usher import Link

_POLYNOMIAL = 0x95AC9329AC4BC9B5


def _crc64(data: bytes) -> int:
    """Redis' own, of a DUMP."""
    crc = 0
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (_POLYNOMIAL if crc & 1 else 0)
    return crc


def set_back(link: Link, stream: str, by_ms: int) -> None:
    """All that is pending in its groups was delivered so much later than it was."""
    dumped = link.call("DUMP", stream)[:-8]
    for group in pairs(link.call("XINFO", "STREAM", stream, "FULL", "COUNT", 0))[b"groups"]:
        for _, _, delivered_ms, _ in pairs(group)[b"pending"]:
            dumped = dumped.replace(
                int(delivered_ms).to_bytes(8, "little"), int(delivered_ms + by_ms).to_bytes(8, "little")
            )
    link.call("RESTORE", stream, 0, dumped + _crc64(dumped).to_bytes(8, "little"), "REPLACE")
