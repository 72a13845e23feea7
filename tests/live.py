"""Read live answers as a client does that asks on and on."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from tests.served import PATIENCE_S
from usher.common.http.answers import LiveStream


def lines(live: LiveStream) -> Iterator[bytes]:
    """What is read, line by line, until it ends (after a while it does). ``close()`` it to leave."""
    over = threading.Timer(PATIENCE_S, live.close)
    over.start()
    text = b""
    try:
        for data in live.response.iter_encoded():
            *whole, text = (text + data).split(b"\n")
            yield from whole
    finally:
        over.cancel()
        live.response.close()
