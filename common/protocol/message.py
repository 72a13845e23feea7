"""Messages: turn a stream entry into the view that a handler gets, and refuse entries that cannot be handed over.

A producer needs no library: ``XADD ticket_stream * ticket_id 42 ...`` from any language is a valid message.
"""

from __future__ import annotations

import codecs
import enum
import json
import re
import uuid
from collections.abc import Sequence
from typing import Any

from usher.common.base.errors import MessageUndecodable
from usher.common.base.text import parse_json
from usher.common.protocol.keys import REPLY_FIELD

#: What programs may give as the key of a ticket, or of a message (uid).
Key = str | bytes | int | uuid.UUID
#: Longest ticket id in bytes: every index, inbox and log carries the ids.
LONGEST_TICKET = 256
UID_FIELD = b"uid"
_ADDRESS = re.compile(rb"(.+:replies:[0-9a-f]{32}) ([0-9]{1,15})", re.DOTALL)
#: Most bytes of JSON in which a ticket id is looked for; below this number a script has all whole ones exactly.
_LONGEST_JSON, _EXACT = 65_536, 2**53
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
BODY_FIELD = b"body"
#: Most chosen fields; most bytes of a name, and of a value that is shown.
MOST_FIELDS, LONGEST_NAME, SHOWN_BYTES = 8, 128, 256
#: Names of a dead letter's own fields begin with it (lua/includes/letter.lua): nobody else's are looked for there.
_OURS = "usher-"
#: Fields of a delayed message: when it is due, in ms since the epoch; and, where several streams are gathered, the
#: stream that it is for.
DUE_FIELD, FOR_FIELD = b"due_ms", b"stream"
#: Field of a replay's message: the id of the message that runs again.
REPLAY_OF = b"usher_replay_of"
#: The reason of dead letters of delayed messages without a readable time (lua/sending/due_delayed.lua).
UNREADABLE_DUE = "unreadable_due_ms"


def check_ticket(ticket: bytes | None) -> bytes:
    """Return the ticket id if an entry with it can be handed over. Raises MessageUndecodable with one of the reasons
    ``no_ticket_id``, ``empty_ticket_id``, ``ticket_id_too_long``, ``ticket_id_not_utf8``.
    """
    if ticket is None:
        raise MessageUndecodable("no_ticket_id")
    if not ticket:
        raise MessageUndecodable("empty_ticket_id")
    if len(ticket) > LONGEST_TICKET:
        raise MessageUndecodable("ticket_id_too_long")
    try:
        ticket.decode()
    except UnicodeDecodeError:
        raise MessageUndecodable("ticket_id_not_utf8") from None
    return ticket


def key_bytes(what: str, value: object) -> bytes:
    """Encode a key (of a ticket, a message, a field): one rule for every door. Raises TypeError for what is no str,
    bytes, int or UUID: its text would be another each time (``<memory at 0x7f...>``), or shared (``None``, ``nan``).

    >>> key_bytes("ticket_id", 42), key_bytes("ticket_id", enum.IntEnum("Colour", "RED").RED)
    (b'42', b'1')
    """
    # The str() of an enum of texts or numbers is its name or its value, depending on the version of Python.
    plain = value.value if isinstance(value, Key) and isinstance(value, enum.Enum) else value
    if isinstance(plain, bool) or not isinstance(plain, Key):
        raise TypeError(
            f"{what} is of type {type(value).__name__}: give a str, bytes, int or UUID (bytes(value) of a bytearray or"
            " memoryview, int(value) of a number of numpy or a float, the key of an object); a row without a key is no"
            " message of a ticket: leave it out, or give it a key of its own"
        )
    # Not str(plain) or bytes(plain), of which a class of one's own may make another text.
    if isinstance(plain, str):
        return str.encode(plain, "utf-8", "surrogateescape")
    if isinstance(plain, bytes):
        return b"".join((plain,))
    return b"%d" % plain if isinstance(plain, int) else uuid.UUID.__str__(plain).encode()


def ticket_key(value: object) -> bytes:
    """Return the ticket id that a program's value is. Raises what ``key_bytes`` and ``check_ticket`` raise."""
    try:
        return check_ticket(key_bytes("ticket_id", value))
    except UnicodeEncodeError:
        raise MessageUndecodable("ticket_id_not_utf8") from None


def first_value(fields: Sequence[bytes], name: bytes) -> bytes | None:
    """Return the value of the first field ``name`` in a flat list of names and values. The first, not the last, because
    the scripts read the ticket so."""
    names = fields[::2]
    return fields[2 * names.index(name) + 1] if name in names else None


def ticket_value(fields: Sequence[bytes], name: bytes) -> bytes | None:
    """Return the ticket id that an entry names, fit or not: the value of the first field ``name``. Without one, a name
    with dots is a path: a text, or a whole number below 2^53, in the JSON object in the field before its first dot. The
    scripts read it so (lua/includes/ticket_of.lua); of what is no JSON they take more than this does only
    where a number is written as no other language writes it (0x10, 01), a NUL follows, or it is nested 1,000 deep.

    >>> ticket_value([b"payload", b'{"order": {"id": 42}}'], b"payload.order.id")
    b'42'
    """
    found = first_value(fields, name)
    root, _, path = name.partition(b".")
    if found is not None or not path or not root:
        return found
    text = first_value(fields, root)
    if text is None or len(text) > _LONGEST_JSON:
        return None
    try:
        value = parse_json(text)
    except ValueError:
        value = _as_scripts_parse(text)
    for key in filter(None, path.decode("utf-8", "surrogateescape").split(".")):
        value = value.get(key) if isinstance(value, dict) else None
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _EXACT and value % 1 == 0:
        return b"%d" % value
    return value.encode("utf-8", "surrogateescape") if isinstance(value, str) else None


def _as_scripts_parse(text: bytes) -> Any:
    """Parse what is no JSON by RFC 8259 and cjson takes all the same: NaN, infinities, numbers of any size, control
    characters, bytes that are not UTF-8. Return None for anything else."""
    if b"\0" in text or _SURROGATE.search(text):
        return None
    try:
        return json.loads(text.decode("utf-8", "surrogateescape"), strict=False)
    except (ValueError, RecursionError):
        return None


def reply_address(fields: Sequence[bytes]) -> tuple[bytes, bytes] | None:
    """Return the key of the stream that an entry's answer is for, and the number of the call; None if nobody waits."""
    found = _ADDRESS.fullmatch(first_value(fields, REPLY_FIELD) or b"")
    return found and (found[1], found[2])


def as_mapping(fields: Sequence[bytes]) -> dict[str, str]:
    """Return the fields as text. Bytes that are not UTF-8 survive as surrogates: ``value.encode("utf-8",
    "surrogateescape")`` gives them back."""
    values = iter(fields)
    mapping: dict[str, str] = {}
    for name, value in zip(values, values, strict=True):
        if name != REPLY_FIELD:
            mapping.setdefault(name.decode("utf-8", "surrogateescape"), value.decode("utf-8", "surrogateescape"))
    return mapping


class EntryView:
    """A handler's view of an entry, whichever program passes it. ``_flat``: names and values by turns, or None when its
    body is gone."""

    __slots__ = ("_fields", "_flat", "stream_id")

    def __init__(self, stream_id: bytes, flat: list[bytes] | None) -> None:
        self.stream_id = stream_id
        self._flat = flat
        self._fields: dict[str, str] | None = None

    @property
    def body_is_gone(self) -> bool:
        """True if the entry was deleted while it was pending; no handler sees such a message."""
        return self._flat is None

    @property
    def flat(self) -> Sequence[bytes]:
        return self._flat or ()

    @property
    def size(self) -> int:
        return sum(map(len, self._flat or ()))

    @property
    def id(self) -> str:
        """The stream id, ``"<milliseconds>-<sequence>"``."""
        return self.stream_id.decode()

    @property
    def uid(self) -> str:
        """The producer's own id of the message (field ``uid``), the same for every copy of it; the stream id if that
        field is missing or empty."""
        given = first_value(self._flat or (), UID_FIELD)
        return given.decode("utf-8", "surrogateescape") if given else self.id

    @property
    def fields(self) -> dict[str, str]:
        """All fields of the producer as text; bytes that are not UTF-8 survive as surrogates (``value.encode("utf-8",
        "surrogateescape")``)."""
        if self._fields is None:
            self._fields = as_mapping(self._flat or ())
        return self._fields

    @property
    def body(self) -> bytes:
        return first_value(self._flat or (), BODY_FIELD) or b""

    def json(self) -> Any:
        """Parse the field ``body`` as JSON; whole numbers of any size stay whole. Raises ValueError when it is not
        JSON."""
        return parse_json(self.body)


# ---- fields for people


def parse_field_names(text: str) -> tuple[str, ...]:
    """Parse USHER_SHOWN_FIELDS. Raises ValueError.

    >>> parse_field_names("order, payload.customer.id"), parse_field_names("")
    (('order', 'payload.customer.id'), ())
    """
    names = tuple(dict.fromkeys(filter(None, (name.strip() for name in text.split(",")))))
    if len(names) > MOST_FIELDS:
        raise ValueError(f"at most {MOST_FIELDS} fields can be shown")
    for name in names:
        check_field_name(name)
    return names


def check_field_name(name: str) -> str:
    """Return the name of a field that can be looked for. Raises ValueError."""
    if not 0 < len(name.encode("utf-8", "surrogateescape")) <= LONGEST_NAME:
        raise ValueError(f"the name of a field has 1 to {LONGEST_NAME} bytes")
    if name.startswith(_OURS):
        raise ValueError(f"names that begin with {_OURS} are not of messages")
    return name


def shown_value(beginning: bytes, size: int) -> str:
    """Return a value as it is shown, of which ``beginning`` was read: what is cut is said, and bytes that are not UTF-8
    are spelt out.

    >>> shown_value(b"paid", 4), shown_value("K\\u00f6ln".encode()[:2], 5), shown_value(b"\\xff", 1)
    ('paid', 'K... (5 bytes)', '\\\\xff')
    """
    is_whole = len(beginning) == size
    text = codecs.getincrementaldecoder("utf-8")("backslashreplace").decode(beginning, final=is_whole)
    return text if is_whole else f"{text}... ({size:,} bytes)"


def shown_fields(names: Sequence[str], values: Sequence[Any]) -> dict[str, str | None]:
    """Return the fields of one message by name, of a reply of read_fields.lua; None where it has none of that name."""
    told = [None if value is None else shown_value(*value) for value in values]
    return dict(zip(names, [*told, *[None] * (len(names) - len(told))], strict=True))
