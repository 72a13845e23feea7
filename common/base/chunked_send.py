"""Send large commands in chunks, with a timeout per chunk, and count the bytes still under way."""

from __future__ import annotations

import fcntl
import socket
import sys
import termios
from collections.abc import Iterable, Iterator

#: Bytes per chunk.
CHUNK_BYTES = 65_536


def split_chunks(packed: Iterable[bytes]) -> Iterator[memoryview]:
    for part in packed:
        view = memoryview(part)
        for at in range(0, len(view), CHUNK_BYTES):
            yield view[at : at + CHUNK_BYTES]


def unsent_bytes(sock: socket.socket) -> int:
    """Return the bytes sent and not yet acknowledged by the peer; 0 where the system does not say (sandboxes, other
    systems): then the reply's timeout begins when the last chunk was accepted."""
    try:
        return int.from_bytes(fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    except OSError:
        return 0
