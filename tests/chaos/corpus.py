"""Hostile messages: each must end in an effect or in the dead letters, and never in a stopped master."""

from __future__ import annotations

Part = bytes | str

#: (what must become of it, the fields of the entry).
HOSTILE: tuple[tuple[str, tuple[Part, ...]], ...] = (
    ("dlq", ("text", "no ticket id")),
    ("dlq", ("ticket_id", "")),
    ("dlq", ("ticket_id", b"\xff\xfe")),
    ("dlq", ("ticket_id", "x" * 1_000_000)),
    ("effect", ("ticket_id", "first", "ticket_id", "second")),
    ("effect", ("ticket_id", "a\x00b")),
    ("effect", ("ticket_id", "{brace}")),
    ("effect", ("ticket_id", "}{")),
    ("effect", ("ticket_id", "two words\r\nINFO fake")),
    ("effect", ("ticket_id", "__proto__")),
    ("effect", ("ticket_id", "../../etc/passwd")),
    ("effect", ("ticket_id", "%00")),
    ("effect", ("ticket_id", "\u202egnp.exe")),
    ("effect", ("ticket_id", "\u00e9")),  # the same letter twice, composed and not: two tickets
    ("effect", ("ticket_id", "e\u0301")),
    ("effect", ("ticket_id", "x" * 256)),
    ("effect", ("ticket_id", "bytes", "body", b"\xff\xfe\x00")),
    ("effect", ("ticket_id", "bytes", b"\xff", b"\xfe")),
    ("effect", ("ticket_id", "empty name", "", "")),
    ("effect", ("ticket_id", "many fields", *(part for n in range(10_000) for part in (f"f{n}", "v")))),
    ("effect", ("ticket_id", "large", "body", b"x" * 5_000_000)),
)
