"""Failover listener: hears from the sentinels when the master is replaced, so that nobody stays with the former one.

After a failover on purpose Sentinel demotes the replaced master some 10 s later. Until then it answers everything, and
what it takes is thrown away. The sentinels publish two moments of a failover: before the new master is promoted (the
one that leads the failover does), and when the address has changed (all of them do).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import redis

from usher.common.base.errors import StartRefused
from usher.common.runtime.service import Service

_PROMOTING = b"+failover-state-send-slaveof-noone"
_SWITCHED = b"+switch-master"
_AGAIN_S = 1.0
_WAIT_S = 30.0

#: The process that listens for a URL: threads do not outlive a fork.
_listening: dict[str, int] = {}

Place = tuple[str, int]
#: Gets the index of a sentinel, and the master that it is about to replace; None: ask it where the master is.
Hear = Callable[[int, Place | None], None]


def listen(url: str, clients: Sequence[Callable[[], Any]], service: str, hear: Hear) -> None:
    """Begin to listen at all sentinels of ``url``, once per process, until the process ends. ``clients`` make a client
    for each; ``hear`` may raise redis.RedisError."""
    if _listening.get(url) == os.getpid():
        return
    _listening[url] = os.getpid()
    for at, make in enumerate(clients):
        # Without a thread, or at the end of the interpreter, links still find the master when a call fails.
        with contextlib.suppress(StartRefused):
            FailoverListener(at, make, service, hear).start()


class FailoverListener(Service):
    name = "failovers"
    stalls_after_s = 2 * _WAIT_S

    def __init__(self, at: int, make: Callable[[], Any], service: str, hear: Hear) -> None:
        super().__init__()
        self._at = at
        self._make = make
        self._service = service
        self._hear = hear

    def run_once(self) -> float:
        client = self._make()
        try:
            with client.pubsub(ignore_subscribe_messages=True) as heard:
                heard.subscribe(_PROMOTING, _SWITCHED)
                self._hear(self._at, None)  # something may have been missed
                while not self.stopping:
                    message = heard.get_message(timeout=_WAIT_S)
                    self.made_progress()
                    if message is not None and (former := former_master(message["data"].decode(), self._service)):
                        self._hear(self._at, former if message["channel"] == _PROMOTING else None)
        except (redis.RedisError, OSError):
            pass  # it is down, or refuses us; the others are heard
        finally:
            client.close()
        return _AGAIN_S


def former_master(words: str, service: str) -> Place | None:
    """Return the address that the master ``service`` has before the event; None if it is about another master. The
    words are name, former address, new address; or those about a replica, an @, and name and address of its master.

    >>> former_master("usher 10.0.0.1 6379 10.0.0.2 6379", "usher")
    ('10.0.0.1', 6379)
    >>> former_master("slave 10.0.0.2:6379 10.0.0.2 6379 @ usher 10.0.0.1 6379", "usher")
    ('10.0.0.1', 6379)
    >>> former_master("other 10.0.0.1 6379 10.0.0.2 6379", "usher")
    """
    name, host, port = (*words.rpartition("@ ")[2].split(" "), "", "", "")[:3]
    return (host, int(port)) if name == service and port.isdecimal() else None
