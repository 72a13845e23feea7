"""Report how the gathering goes, for pages, commands and programs: which master has which share, what is behind, and
what needs a person."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from usher.common.base.errors import GroupMissing
from usher.common.protocol.keys import Keys
from usher.common.protocol.sources import SCOPED_TICKET_FIELD, SHARDS, SourceSelection, shard_of
from usher.common.redis.client import Link
from usher.common.redis.replies import pairs, redis_ms
from usher.common.redis.scripts import ScriptRunner

#: Most sources that are looked at; and of one call.
_MOST_LOOKED_AT, _PAGE = 5000, 100
#: Most entries of one source that are counted where Redis does not know their number.
_MOST_COUNTED = 100
_WORST = 5
#: A note that seems to hold for longer was made before Redis' clock was set back, and its master may be dead: no lease
#: is longer.
_LONGEST_NOTE_MS = 600_000
#: States that need a person. A listed stream that does not exist yet is none of them.
_BAD = frozenset({"not_a_stream", "ahead"})
#: Number of finished entries of the work stream that cannot be cut, because one below them is pending, from which on a
#: person must look.
_MOST_KEPT = 100_000


class _Look(NamedTuple):
    source: bytes
    state: str
    lag: int
    is_more: bool


class SourcesReader:
    def __init__(self, link: Link, keys: Keys, sources: SourceSelection) -> None:
        self._link = link
        self._scripts = ScriptRunner(link)
        self._keys = keys
        self._sources = sources
        self._rows: list[dict[str, Any]] = []  # of the last overview; those that need a person first

    def overview(self) -> dict[str, Any]:
        """Return the number of sources that were gathered from or are listed, the entries not gathered yet (``lag``; of
        at most ``looked_at`` of them), the worst, the masters, and troubles by source."""
        masters, urls = self._masters()
        names = self._names()
        looks = [look for at in range(0, len(names), _PAGE) for look in self._look(names[at : at + _PAGE])]
        worst = sorted((look for look in looks if look.lag), key=lambda look: -look.lag)[:_WORST]
        troubles = {_decode_source(look.source): look.state for look in looks if look.state in _BAD}
        for master in masters:
            troubles |= {
                source: f"{outcome}: {words}" if words else outcome for source, outcome, words in master.pop("troubles")
            }
        troubles |= self._held_back()
        looked_at = {_decode_source(look.source) for look in looks}
        others = [_Look(name.encode(), "not_gathered", 0, False) for name in troubles if name not in looked_at]
        rows = [
            self._row(look, urls) | {"state": look.state, "trouble": troubles.get(_decode_source(look.source), "")}
            for look in (*looks, *others)
        ]
        self._rows = sorted(rows, key=lambda row: (not row["trouble"], -row["lag"], row["source"]))
        listed_alone = len(set(self._sources.names) - looked_at)
        return {
            "sources": max(len(looks), self._link.call("HLEN", self._keys.gathered) - 1) + listed_alone,
            "looked_at": len(looks),
            "lag": sum(look.lag for look in looks),
            "lag_is_exact": not any(look.is_more for look in looks) and len(looks) < _MOST_LOOKED_AT,
            "worst": [self._row(look, urls) for look in worst],
            "masters": masters,
            "troubles": troubles,
        }

    def rows(self, text: str, start: int, most: int) -> tuple[list[dict[str, Any]], int]:
        """Return ``most`` rows of the last overview with ``text`` in their name, from the ``start``-th on, and the
        number of all such rows. ``state``: ok, no_group (not looked at yet), gone, not_a_stream, ahead or not_gathered;
        ``trouble``: what needs a person, or ""."""
        fitting = [row for row in self._rows if text in row["source"]]
        return fitting[start : start + most], len(fitting)

    def _held_back(self) -> dict[str, str]:
        """Return the work stream when it grows because one entry stays pending: only what is below that entry is
        cut."""
        stream, group = self._keys.stream, self._keys.group
        length = self._link.call("XLEN", stream)
        if length < _MOST_KEPT:
            return {}
        try:
            oldest = self._link.call("XPENDING", stream, group, "-", "+", 1)
            # Few of these were not given to the group yet: gather.lua waits.
            kept = length - self._link.call("XPENDING", stream, group)[0]
        except GroupMissing:
            return {}
        if not oldest or kept < _MOST_KEPT:
            return {}
        entry_id, owner = oldest[0][:2]
        found = self._link.call("XRANGE", stream, entry_id, entry_id)
        ticket = found[0][1][3].decode(errors="replace") if found and found[0][1][2:3] == [SCOPED_TICKET_FIELD] else ""
        of_ticket = f" of ticket {ticket}" if ticket else ""
        why = f"{entry_id.decode()}{of_ticket} is pending under {owner.decode()}"
        return {stream: f"held_back: {kept:,} entries that are not pending are kept because {why}"}

    def _names(self) -> list[bytes]:
        names = [name.encode() for name in self._sources.names]
        seen = dict.fromkeys(itertools.chain(names, self._gathered()))
        return list(itertools.islice(seen, _MOST_LOOKED_AT))

    def _gathered(self) -> Iterator[bytes]:
        cursor, count = b"0", 0
        while count < _MOST_LOOKED_AT:
            cursor, flat = self._link.call("HSCAN", self._keys.gathered, cursor, "COUNT", 1000)
            fields = [name for name in flat[::2] if name]  # "" is gather.lua's own
            count += len(fields)
            yield from fields
            if cursor == b"0":
                return

    def _look(self, sources: Sequence[bytes]) -> Iterator[_Look]:
        flat = self._scripts.run("look_at_sources", sources, (self._keys.group, _MOST_COUNTED))
        for source, state, lag, more in zip(sources, flat[::3], flat[1::3], flat[2::3], strict=True):
            yield _Look(source, state.decode(), lag, bool(more))

    def _masters(self) -> tuple[list[dict[str, Any]], list[str]]:
        """Return the masters that run, with the number of their shards; and their URLs in the order in which they share
        the shards. A dead master stays noted until another one removes it."""
        notes = pairs(self._link.call("HGETALL", self._keys.shares))
        masters = []
        running = running_masters(notes, redis_ms(self._link))
        for at, holder in enumerate(running):
            says = orjson.loads(notes[holder].partition(b" ")[2])
            shown = {name: says[name] for name in ("url", "setting", "sources", "mode", "moved", "troubles")}
            masters.append({**shown, "shards": len(range(at, SHARDS, len(running)))})
        return masters, [master["url"] for master in masters]

    @staticmethod
    def _row(look: _Look, urls: list[str]) -> dict[str, Any]:
        return {
            "source": _decode_source(look.source),
            "lag": look.lag,
            "lag_is_exact": not look.is_more,
            "master": urls[shard_of(look.source) % len(urls)] if urls else "",
        }


def running_masters(notes: Mapping[bytes, bytes], now_ms: int) -> list[bytes]:
    """Return the masters that share the sources, in the order in which they do: those that noted so for a time to come
    (``<until when, in ms> <what it says>``). A shard belongs to the one at its number, modulo their number.

    >>> running_masters({b"b": b"2000 {}", b"a": b"2000 {}", b"dead": b"900 {}", b"odd": b"1a2b"}, 1000)
    [b'a', b'b']
    """
    heads = {master: note.partition(b" ")[0] for master, note in notes.items()}
    until_ms = {master: int(head) if head.isdigit() else 0 for master, head in heads.items()}  # 0: not one of ours
    return sorted(master for master, until in until_ms.items() if now_ms < until <= now_ms + _LONGEST_NOTE_MS)


def _decode_source(source: bytes) -> str:
    return source.decode(errors="replace")
