"""Measure whether Redis' memory stays flat over days of load, and whether something was cut that was needed. Days are
short ones: USHER_TRIM_KEEP and the run log are as much smaller; all else is as by default."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from benchmarks.programs.handlers import BROKEN_UNTIL
from benchmarks.rig.findings import judge
from benchmarks.rig.recording import FOLDER_VARIABLE, PeerJob, read_notes
from benchmarks.rig.system import Rig
from usher.common.doctor.judgements import info_lines
from usher.common.redis.replies import pairs
from usher.deploy.bench.rig import STREAM, BenchFailed
from usher.master.operations.shelves import DeadLetters
from usher.master.policy.letters import LetterFilter

_TICKETS, _BODY, _SLOW = 200, b"x" * 100, "slow"
#: Days: by which the slow group is behind, at which a ticket is halted and repaired, from which memory is settled.
_BEHIND, _HALTED, _REPAIRED, SETTLED = 1.5, 2.0, 3.0, 4.0
#: Samples of a day; seconds between two sends; for what is left at the end.
_SAMPLES, _EVERY_S, _PATIENCE_S = 6, 0.1, 120.0


def growth(
    days: float, day_s: float, rate: float, streams: int, durable: bool, environ: Mapping[str, str]
) -> dict[str, Any]:
    """Run once. A day of ``day_s`` seconds has ``rate`` messages in each."""
    with Rig(durable, environ, STREAM if streams == 1 else f"{STREAM}:*") as rig:
        folder = rig.folder
        PeerJob(str(folder), rig.url, int(1.1 * days * day_s * rate) + 1000, len(_BODY), 2, 0).save([])
        load = _Traffic(rig, [STREAM] if streams == 1 else [f"{STREAM}:{number}" for number in range(streams)])
        settings = {
            "USHER_TRIM_KEEP": f"{day_s:g}s",
            "USHER_RUN_LOG_LENGTH": "500",
            "USHER_MAX_ATTEMPTS": "1",
            "USHER_DEAD_LETTER_POLICY": "halt",
            FOLDER_VARIABLE: str(folder),
        }
        rig.start_programs(2, "benchmarks.programs.handlers:recorded_unless_broken", settings)
        rig.release()
        rows: list[dict[str, Any]] = []
        began_s, is_halted = time.monotonic(), False
        while (day := (time.monotonic() - began_s) / day_s) < days:
            rig.check()
            if day >= _HALTED and not is_halted:
                is_halted = True
                load.break_next(time.time() + (_REPAIRED - day) * day_s)
            load.send(int(day * day_s * rate))
            load.read_slowly(int(_BEHIND * day_s * rate / streams))
            if day > _REPAIRED:
                load.redrive()
            if day * _SAMPLES >= len(rows):
                rows.append({"day": round(day, 2)} | load.sample())
            time.sleep(_EVERY_S)
        load.finish()
        verdict = judge(read_notes(folder), load.tickets.elements())
        settled = [row["redis_mib"] for row in rows if row["day"] >= SETTLED]
        return {
            "streams": streams,
            "messages": load.tickets.total(),
            "settled_mib": settled[0],
            "last_mib": settled[-1],
            "ratio": round(max(settled) / settled[0], 3),
            "lost": verdict.lost + load.missed,
            "doubled": verdict.doubled,
            "out_of_order": verdict.out_of_order,
            "declared_losses": rig.link.call("XLEN", rig.keys.losses),
            "samples": rows,
            "cpu_seconds": {who: round(spent, 1) for who, spent in rig.cpu().items()},
            "redis": rig.redis_version(),
        }


class _Traffic:
    """Messages that are sent, and the readers beside Usher. ``tickets``: messages of each; ``missed``: those that the
    slow group was not given."""

    def __init__(self, rig: Rig, names: list[str]) -> None:
        self._rig, self._link, self._names = rig, rig.link, names
        self._letters = DeadLetters(rig.link, rig.keys)
        self.tickets: Counter[int] = Counter()
        self.missed = 0
        self._broken_s, self._last = 0.0, b""
        self._sent: Counter[str] = Counter()
        self._read: Counter[str] = Counter()
        for name in names:
            self._link.call("XGROUP", "CREATE", name, _SLOW, "0", "MKSTREAM")

    def break_next(self, until_s: float) -> None:
        """Have the next message fail until then."""
        self._broken_s = until_s

    def send(self, count: int) -> None:
        """Send what is missing of ``count``."""
        commands = []
        for number in range(self.tickets.total(), count):
            ticket = number % _TICKETS
            name = self._names[ticket % len(self._names)]
            self.tickets[ticket] += 1
            self._sent[name] += 1
            until_s, self._broken_s = self._broken_s, 0.0
            numbers = ("number", self.tickets[ticket], "place", self._sent[name], BROKEN_UNTIL, str(until_s))
            commands.append(("XADD", name, "*", "ticket_id", ticket, *numbers, "body", _BODY))
        for reply in self._link.pipeline(commands) if commands else ():
            if isinstance(reply, Exception):
                raise reply
            self._last = bytes(reply)

    def read_slowly(self, behind: int) -> None:
        """Have the slow group read and acknowledge all but the last ``behind`` of each stream."""
        for name in self._names:
            while (count := self._sent[name] - behind - self._read[name]) > 0:
                asked = ("XREADGROUP", "GROUP", _SLOW, "reader", "COUNT", min(count, 1000), "STREAMS", name, ">")
                found = self._link.call(*asked)
                if not found:
                    raise BenchFailed(f"{count} entries of {name} are gone that the slow group had not read")
                entries = found[0][1]
                last = int(pairs(entries[-1][1])[b"place"])
                self.missed += last - self._read[name] - len(entries)
                self._read[name] = last
                self._link.call("XACK", name, _SLOW, *(entry_id for entry_id, _ in entries))

    def redrive(self) -> None:
        """Do what an operator does after the repair."""
        letters = self._letters.page(LetterFilter(), None, 10).letters
        if letters:
            self._letters.redrive([letter.id for letter in letters])

    def finish(self) -> None:
        """Wait until everything is read and done."""
        self.read_slowly(0)
        last = b"-%d" % self.tickets.total() if len(self._names) > 1 else self._last
        self._rig.wait_until_done(last, _PATIENCE_S)

    def sample(self) -> dict[str, Any]:
        """Return the memory, and the number of entries, by now."""
        keys, beside = self._rig.keys, self._names if len(self._names) > 1 else []
        lengths = self._link.pipeline([("XLEN", one) for one in (keys.stream, keys.runs, *beside)])
        used = int(info_lines(self._link.call("INFO", "memory"))["used_memory"])
        return {
            "redis_mib": round(used / 2**20, 2),
            "ticket_stream": lengths[0],
            "sources": sum(lengths[2:]),
            "run_log": lengths[1],
            "sent": self.tickets.total(),
            "halted": self._link.call("XLEN", keys.dead),
        }
