"""Commands that take their time to leave: in pieces, each with the time of a reply, and how much of them is still on
its way."""

from __future__ import annotations

import fcntl
import socket
import sys
import termios
from collections.abc import Iterable, Iterator

#: Bytes that are sent at a time.
CHUNK_BYTES = 65_536


def split_chunks(packed: Iterable[bytes]) -> Iterator[memoryview]:
    for part in packed:
        view = memoryview(part)
        for at in range(0, len(view), CHUNK_BYTES):
            yield view[at : at + CHUNK_BYTES]


def unsent_bytes(sock: socket.socket) -> int:
    """Bytes that were sent and have not arrived, as far as the system knows; 0 where it does not say (sandboxes, other
    systems): then the time of a reply begins when the last piece was taken."""
    try:
        return int.from_bytes(fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    except OSError:
        return 0
