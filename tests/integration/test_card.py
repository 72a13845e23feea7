"""The protocol as Redis sees it: masters take messages with XREADGROUP and give them to their owners with
XCLAIM."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter

import redis

from tests.hands import Keys, pairs
from tests.integration.routers import PATIENCE_S
from usher import Link
from usher.testing import Kit

_END = "that is all"


class Watched:
    """Every command that Redis executes, those of scripts too, from when this is made until ``words`` is called."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._words: list[list[str]] = []
        self._watching = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        assert self._watching.wait(PATIENCE_S)

    def _watch(self) -> None:
        with redis.Redis.from_url(self._link.url) as client, client.monitor() as monitor:
            self._watching.set()
            for one in monitor.listen():
                if one["command"] == f"ECHO {_END}":
                    break
                self._words.append(one["command"].split(" "))

    def words(self) -> list[list[str]]:
        self._link.call("ECHO", _END)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        return self._words


def test_xreadgroup_and_xclaim_carry_two_thousand_messages_and_the_group_is_never_set(link: Link) -> None:
    with contextlib.closing(Kit(link.url, lambda message: None)) as kit:
        watched = Watched(link)
        sent = [kit.send(f"T{number % 97}", {"n": str(number)}) for number in range(2000)]
        kit.run()
        words = watched.words()
        assert len(kit.calls) == 2000
    keys, taken, claimed = Keys("ticket_stream", "concurrency_stream_group"), 0, Counter[str]()
    for command, *rest in words:
        if command == "XREADGROUP" and rest[-1] == ">":
            assert rest[:3] == ["GROUP", keys.group, "master"]
            taken += int(rest[rest.index("COUNT") + 1])
        elif command == "XCLAIM" and rest[2] != "master":
            claimed.update(word for word in rest[4:] if "-" in word)
    assert taken >= 2000, "so many at most"
    [group] = link.call("XINFO", "GROUPS", keys.stream)
    last = sent[-1]
    assert pairs(group)[b"last-delivered-id"] == (last.encode() if isinstance(last, str) else last)
    assert claimed == Counter(one if isinstance(one, str) else one.decode() for one in sent)
    assert not [one for one in words if one[:2] == ["XGROUP", "SETID"]]
