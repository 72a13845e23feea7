"""Find what is still known of a ticket: its entries, executions and dead letters, newest first, whatever state it is
in.

Nothing is kept per ticket, so the streams are searched backwards, in Redis, a bounded piece at a time; the caller asks
for the next piece.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

import orjson

from usher.common.base.clock import wall_ms
from usher.common.protocol.attempts import Attempts
from usher.common.protocol.attempts import decode as decode_attempts
from usher.common.protocol.keys import Keys
from usher.common.protocol.last_error import RUNS, TRACEBACK
from usher.common.protocol.last_error import decode as decode_error
from usher.common.protocol.message import DUE_FIELD, REPLAY_OF, UID_FIELD, first_value, ticket_value
from usher.common.protocol.registration import name_of
from usher.common.protocol.run_log import CRASHED, DONE, FAILED, GAVE_UP, RunRecord, decode, decode_kept
from usher.common.protocol.stream_id import is_id, milliseconds, rank
from usher.common.protocol.ticket_states import BY_OWNER, TicketState
from usher.common.redis.client import Link
from usher.common.redis.replies import group_of
from usher.common.redis.scripts import ScriptRunner
from usher.master.operations.dead_letters import DeadLetters
from usher.master.policy.explain.stuck import fence_ms
from usher.master.policy.letters import LetterFilter

#: Entries, or records of executions, that one call looks at: a millisecond or so of Redis.
_ENTRIES_AT_ONCE, _RUNS_AT_ONCE = 1_000, 50
#: Seconds that a piece spends on one stream, the first of a ticket and any other; and about how many events it finds.
_FIRST_S, _PIECE_S, _PIECE_EVENTS = 0.02, 0.06, 200
#: Seconds after which a search for tickets by a part of their ids ends.
_LOOK_S = 0.06
_LETTERS = 50
#: Unfinished messages of a ticket whose executions are looked for, and units of the bars that show some.
_OF_MESSAGES, BAR = 30, 300
#: Bytes of a field that are shown unless the whole is asked for.
_SHOWN = 4_096
#: Clocks may differ by so much: a record of the run log may have a lower time than its message.
_CLOCKS_MS = 60_000
END = "end"
_BACK = re.compile(rf"({END}|\([0-9]{{1,20}}-[0-9]{{1,20}})_({END}|\([0-9]{{1,20}}-[0-9]{{1,20}})")


class TicketHistory:
    def __init__(self, link: Link, keys: Keys, ticket_field: str) -> None:
        self._link, self._scripts, self._keys, self._field = link, ScriptRunner(link), keys, ticket_field
        self._letters = DeadLetters(link, keys)

    def timeline(
        self, ticket_id: str, back: str | None = None, known: Sequence[str] = (), held: tuple[str, int] | None = None
    ) -> dict[str, Any]:
        """Return one piece. ``known``: entries to list in the first piece, however old; ``held``: the ticket's present
        owner and its fence. Raises ValueError when ``back`` is not from an earlier piece.

        ``events``: newest first; ``back``: where the next piece begins, None at the beginning of the streams;
        ``since_ms``: how far back this piece went; ``attempts``: those of the first message that failed
        (``attempts_shown``)."""
        if back is not None and not _BACK.fullmatch(back):
            raise ValueError("not a position in a history")
        entries_from, runs_from = (back or "+_+").split("_")
        ticket = ticket_id.encode()
        piece_s = _PIECE_S if back else _FIRST_S
        letters = [] if back else self._letters.newest(LetterFilter(ticket), None, _LETTERS, _FIRST_S).letters
        rows = {row["message_id"]: row for row in (letter.row() for letter in letters)}
        written = [{"event": "dead_letter", "ms": row["written_ms"], "letter": row} for row in rows.values()]
        events = [event | {"message_id": one if is_id(one) else ""} for event, one in zip(written, rows, strict=True)]
        kept = self._kept([] if back else known[:_OF_MESSAGES], ticket_id)
        kept |= {one.runs[0].id: one.runs for one in reversed(letters) if one.runs}
        ends_s = time.monotonic() + piece_s
        reached = []
        if entries_from != END:
            ids, entries_from = self._find("entries", entries_from, (self._field, ticket), ends_s)
            sent = dict.fromkeys([*(one.decode() for one in ids), *(() if back else known)])
            events += [{"event": "sent", "ms": milliseconds(one.encode()), "message_id": one} for one in sent]
            reached.append(entries_from)
        if runs_from != END:
            text = orjson.dumps(ticket_id)
            records, runs_from = self._find("runs", runs_from, (text,), ends_s + piece_s)
            events += [_ran(run) for record in records for run in decode(record) if run.ticket == ticket_id]
            reached.append(runs_from)
        seen = {(event["message_id"], event.get("attempt")) for event in events}
        events += [_ran(run) for runs in kept.values() for run in runs if (run.id, run.attempt) not in seen]
        events += _hand_overs([event for event in events if event["event"] == "ran"])
        if held is not None and not back and all(event.get("fence") != held[1] for event in events):
            events.append(_handed(fence_ms(held[1]), *held))  # no execution under this fence has ended yet
        events.sort(key=lambda event: (event["ms"], rank((event["message_id"] or "0-0").encode())), reverse=True)
        more = entries_from != END or runs_from != END
        times = [milliseconds(one.removeprefix("(").encode()) for one in reached if one != END]
        shown = next(iter(kept.values()), ())
        attempts = attempts_shown(shown, shown[0].id in rows) if shown else []
        back = f"{entries_from}_{runs_from}" if more else None
        return {"events": events, "back": back, "since_ms": max(times, default=None), "attempts": attempts}

    def _kept(self, ids: Sequence[str], ticket: str = "") -> dict[str, Sequence[RunRecord]]:
        """Return the executions that are kept with messages of these that failed."""
        values = self._link.call("HMGET", self._keys.errors, *(RUNS + one.encode() for one in ids)) if ids else []
        named = zip(ids, values, strict=True)
        return {one: runs for one, value in named if value and (runs := decode_kept(value, ticket, one))}

    def _find(
        self, what: str, start: str, wanted: tuple[str | bytes, ...], ends_s: float, command: str = "XREVRANGE"
    ) -> tuple[list[bytes], str]:
        key, at_once = (self._keys.stream, _ENTRIES_AT_ONCE) if what == "entries" else (self._keys.runs, _RUNS_AT_ONCE)
        wanted, ends = wanted if what == "entries" else ("batch", *wanted, "part"), "+" if command == "XRANGE" else "-"
        found: list[bytes] = []
        while True:
            _, last, some, is_all = self._scripts.run("find_entries", (key,), (command, start, ends, at_once, *wanted))
            found += some
            if is_all:
                return found, END
            start = f"({last.decode()}" if last else start
            if time.monotonic() > ends_s or len(found) >= _PIECE_EVENTS:
                return found, start

    def message(self, message_id: str) -> dict[str, Any] | None:
        """Return a message with its fields as pairs, long values cut; None when it is not in the stream."""
        rows = self._link.call("XRANGE", self._keys.stream, message_id, message_id)
        if not rows:
            return None
        flat = rows[0][1]
        pairs = [[_truncate_value(flat[at]), _truncate_value(flat[at + 1])] for at in range(0, min(len(flat), 400), 2)]
        ticket = ticket_value(flat, self._field.encode())
        named = None if ticket is None else ticket.decode(errors="replace")
        told = {"message_id": message_id, "ticket_id": named, "fields": pairs}
        return told | {"field_count": len(flat) // 2, "bytes": sum(map(len, flat))}

    def standing(self, message_id: str, is_there: bool) -> TicketState | None:
        """Return the state of a message by its place in the group, whatever its ticket; None when it is neither pending
        nor still to be read. ``is_there``: the stream has it."""
        keys = self._keys
        asked = ("XPENDING", keys.stream, keys.group, message_id, message_id, 1)
        groups, taken, pending = self._link.pipeline([("XINFO", "GROUPS", keys.stream), ("GET", keys.taken), asked])
        group = group_of(groups, keys.group, taken)
        if group is not None and pending:
            return BY_OWNER.get(bytes(pending[0][1]), TicketState.HANDED_OVER)
        is_unread = group is None or rank(message_id.encode()) > rank(group[b"last-delivered-id"])
        return TicketState.UNREAD if is_there and is_unread else None

    def executions(self, message_id: str, after: str | None = None, kept: Sequence[Any] = ()) -> dict[str, Any]:
        """Return the executions of a message, oldest first: from when it was sent, or (the next piece) behind a record
        of the run log. ``kept``: those that its dead letter has.

        ``more``: behind which record of the run log the search goes on, None at its end, and ``until_ms`` how far it
        came; ``begins_ms``: with what the run log begins, None: it is empty; ``is_cut``: earlier executions may have
        been in it, since the first one that is found is no first attempt, or none is found and the log begins after the
        message was sent."""
        sent_ms, text = milliseconds(message_id.encode()), orjson.dumps(message_id)
        start = f"({after}" if after else f"{max(0, sent_ms - _CLOCKS_MS)}-0"
        first = self._link.call("XRANGE", self._keys.runs, "-", "+", "COUNT", 1)
        records, start = self._find("runs", start, (text,), time.monotonic() + _PIECE_S, "XRANGE")
        found = [_ran(run) for record in records for run in decode(record) if run.id == message_id]
        if not after:
            kept, seen = kept or self._kept([message_id]).get(message_id, ()), {run["attempt"] for run in found}
            found += [_ran(run) for run in kept if run.attempt not in seen]
            found.sort(key=lambda run: run["began_ms"])
        begins_ms = milliseconds(first[0][0]) if first else None
        more = None if start == END else start.removeprefix("(")
        until_ms = milliseconds(more.encode()) if more else None
        is_cut = not after and (found[0]["attempt"] > 1 if found else (begins_ms or sent_ms) > sent_ms)
        told = {"runs": found, "more": more, "until_ms": until_ms}
        return told | {"begins_ms": begins_ms, "is_cut": is_cut}

    def finished(
        self, ticket: str, handler: str, before: str = "", most: int = 100
    ) -> tuple[list[dict[str, Any]], str | None]:
        """Return at least the ``most`` newest executions after which a message was done or a dead letter, newest first;
        only those of a ticket and of a handler, if given. And behind which record of the run log others may be; None:
        none are."""
        text = orjson.dumps(ticket) if ticket else b'"handler":' + orjson.dumps(handler) if handler else b""
        start, at_once, ends_s = f"({before}" if before else "+", 1, time.monotonic() + _PIECE_S
        rows = list[dict[str, Any]]()
        while True:
            args = ("XREVRANGE", start, "-", at_once, "batch", text, "part")
            _, last, records, is_all = self._scripts.run("find_entries", (self._keys.runs,), args)
            named = [(run, orjson.loads(record).get("handler", "")) for record in records for run in decode(record)]
            ran = [(run, by) for run, by in named if ticket in ("", run.ticket) and handler in ("", by)]
            letters = self._letters.of_messages({run.id for run, _ in ran if run.outcome in (FAILED, CRASHED)})
            buried = {(one, letter.attempts) for one, letter in letters.items()}
            ran = [(run._replace(outcome=GAVE_UP) if (run.id, run.attempt) in buried else run, by) for run, by in ran]
            rows += [_ran(run) | {"handler": by} for run, by in ran if run.outcome in (DONE, GAVE_UP)]
            start, at_once = f"({last.decode()}", min(_RUNS_AT_ONCE, 2 * at_once)
            if is_all or len(rows) >= most or time.monotonic() > ends_s:
                return sorted(rows, key=lambda row: -row["ms"]), None if is_all else last.decode()

    def beside(self, message_id: str) -> dict[str, Any]:
        """Return what is kept beside a message: its attempts and last error, when it was to be sent, of which message
        it is a redrive or replay, and which ones are of it, as far as one piece goes back."""
        keys, entry_id, ends_s = self._keys, message_id.encode(), time.monotonic() + _PIECE_S
        noted, (error, traceback), rows = self._link.all_of(
            [
                ("HGET", keys.attempts, entry_id),
                ("HMGET", keys.errors, entry_id, TRACEBACK + entry_id),
                ("XRANGE", keys.stream, message_id, message_id),
            ]
        )
        flat = rows[0][1] if rows else []
        due, uid, replayed = (first_value(flat, name) or b"" for name in (DUE_FIELD, UID_FIELD, REPLAY_OF))
        redriven = uid.decode(errors="replace")
        again: list[str] = []
        is_all = True
        for field in ("usher_replay_of", "uid"):
            some, reached = self._find("entries", "+", (field, entry_id), ends_s)
            again += [one.decode() for one in some]
            is_all = is_all and reached == END
        last, attempts = decode_error(error), Attempts() if noted is None else decode_attempts(noted)
        told: dict[str, Any] = {"sent_ms": milliseconds(entry_id)}
        told |= {"due_ms": int(due.partition(b".")[0]) if due.partition(b".")[0].isdigit() and len(due) <= 20 else None}
        told |= {"replay_of": _id_or_none(replayed.decode(errors="replace"), message_id)}
        told |= {"redriven_from": _id_or_none(redriven, message_id) if not replayed else None}
        told |= {"again": [one for one in dict.fromkeys(again) if one != message_id]}
        told |= {"again_is_all": is_all}
        known = {"attempts": attempts._asdict(), "traceback": (traceback or b"").decode(errors="replace")}
        return told | {"noted": known | {"last_error": last and last._asdict() | {"told": last.told}}}

    def containing(self, text: str, most: int, cursor: str = "0") -> tuple[list[tuple[bytes, bytes]], str | None]:
        """Return about ``most`` tickets in processing whose id contains ``text``, with their records; and the next
        cursor, None at the end."""
        pattern = b"*" + re.sub(rb"[*?\[\]^\\-]", rb"\\\g<0>", text.encode()) + b"*"
        ends_s = time.monotonic() + _LOOK_S
        found: dict[bytes, bytes] = {}
        count = most
        while True:
            reply, flat = self._link.call("HSCAN", self._keys.tickets, cursor, "MATCH", pattern, "COUNT", count)
            count = most if flat else 1000  # the rarer the matches, the more records per call
            found.update(zip(flat[::2], flat[1::2], strict=True))
            cursor = bytes(reply).decode()
            if cursor == "0":
                return list(found.items()), None
            if len(found) >= most or time.monotonic() > ends_s:
                return list(found.items()), cursor


def attempts_shown(runs: Sequence[RunRecord], is_over: bool) -> list[dict[str, Any]]:
    """Return attempts of a message as a page draws them, each with its wait before: from ``x`` on it waited, from
    ``start`` on it ran, of ``BAR`` units that last until now, or the last end."""
    ends, shown, before = [(run.end_us or run.start_us) // 1000 for run in runs], list[dict[str, Any]](), 0
    begin = free = min(milliseconds(runs[0].id.encode()), runs[0].start_us // 1000)
    scale = BAR / max(1, (max(ends) if is_over else wall_ms()) - begin)
    for run, end_ms in zip(runs, ends, strict=True):
        start_ms = run.start_us // 1000
        x, start, end = (round((ms - begin) * scale, 1) for ms in (free, start_ms, end_ms))
        told: dict[str, Any] = {
            "waited_ms": max(0, start_ms - free),
            "took_ms": (run.end_us - run.start_us) / 1000 if run.end_us else None,
        }
        told |= {"x": x, "start": start, "ran": max(2.0, round(end - start, 1)), "start_ms": start_ms}
        shown.append(
            run._asdict() | told | {"lacks": run.attempt - before - 1, "name": name_of(run.consumer) or run.consumer}
        )
        free, before = end_ms, run.attempt
    return shown


def _ran(run: RunRecord) -> dict[str, Any]:
    took_ms, ms = (run.end_us - run.start_us) / 1000 if run.end_us else None, (run.end_us or run.start_us) // 1000
    told: dict[str, Any] = {"event": "ran", "ms": ms, "message_id": run.id, "ticket_id": run.ticket, "took_ms": took_ms}
    told |= {"began_ms": run.start_us // 1000, "ended_ms": run.end_us // 1000 or None}
    told |= {"outcome": run.outcome, "attempt": run.attempt}
    told |= {"fence": run.fence, "owner": run.consumer, "name": name_of(run.consumer) or run.consumer}
    return told | ({"into": run.into} if run.into else {}) | ({"interrupted": True} if run.interrupted else {})


def _id_or_none(text: str, own: str) -> str | None:
    return text if is_id(text) and text != own else None


def _hand_overs(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return when each owner was given the ticket: a fence tells the millisecond (lua/includes/numbers.lua), unless
    a clock went back."""
    first: dict[int, dict[str, Any]] = {}
    for run in runs:
        known = first.setdefault(run["fence"], run)
        if run["began_ms"] < known["began_ms"]:
            first[run["fence"]] = run
    return [_handed(min(fence_ms(fence), run["began_ms"]), run["owner"], fence) for fence, run in first.items()]


def _handed(ms: int, owner: str, fence: int) -> dict[str, Any]:
    return {"event": "handed", "ms": ms, "message_id": "", "owner": owner, "fence": fence}


def _truncate_value(value: bytes) -> str:
    text = value[:_SHOWN].decode("utf-8", "backslashreplace")
    return text if len(value) <= _SHOWN else f"{text}... ({len(value):,} bytes)"
