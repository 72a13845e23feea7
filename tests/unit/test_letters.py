"""Dead letters as values, and what is kept of the way to an error."""

from __future__ import annotations

from usher.common.protocol.attempts import RAN_PAST, Attempts
from usher.consumer.handlers.error_trace import traced
from usher.consumer.policy.outcome import unended
from usher.master.policy.letters import DeadLetter, LetterFilter, Preview, parse_letter, split_letter

_HEAD = [
    b"usher-id", b"5-1", b"usher-ticket", b"T\xff", b"usher-reason", b"gave_up", b"usher-error", b"ValueError: Not Now", b"usher-attempts", b"3",
    b"usher-owner", b"c1:7", b"usher-first-ms", b"1", b"usher-last-ms", b"2", b"usher-policy", b"halt", b"usher-fence", b"9",
    b"usher-error-type", b"ValueError", b"usher-traceback", b"at x", b"usher-fields", b"1",
]  # fmt: skip


def _letter(letter_id: bytes = b"7000-0", **changed: bytes) -> DeadLetter:
    head = list(_HEAD)
    for name, value in changed.items():
        head[head.index(b"usher-" + name.replace("_", "-").encode()) + 1] = value
    return parse_letter(letter_id, head)


def test_a_letter_is_split_where_ours_ends_whatever_the_producer_calls_its_fields() -> None:
    theirs = [b"usher-fields", b"99", b"usher-id", b"theirs"]
    assert split_letter(_HEAD + theirs) == (_HEAD, theirs)
    named_so = [b"usher-ticket", b"usher-fields", b"usher-fields", b"1"]
    assert split_letter(named_so + theirs) == (named_so, theirs), "so may a ticket be called"
    assert split_letter([b"a", b"1"]) == ([b"a", b"1"], [])


def test_what_is_missing_or_no_number_hides_no_letter() -> None:
    for head in (
        [],
        [b"usher-id"],
        [b"usher-attempts", b"many"],
        [b"usher-fence", b"9" * 30],
        [b"usher-attempts", "\u00b2".encode()],
    ):
        letter = parse_letter(b"1-1", head)
        assert (letter.id, letter.attempts, letter.fence, letter.reason) == (b"1-1", 0, 0, "")
    assert _letter().row()["ticket_id"] == "T\ufffd"
    assert (_letter().attempts, _letter().fence, _letter().written_ms, _letter().cut) == (3, 9, 7000, False)


def test_what_hung_or_took_its_process_with_it_has_a_name_and_can_be_asked_for() -> None:
    cut_off, hung = unended(Attempts(3, 3, 1)).error, f"{RAN_PAST} (handler_stuck in the logs)"
    of_crash, of_hang = (
        _letter(error_type=b"", error=one.encode(), reason=b"attempts_exhausted") for one in (cut_off, hung)
    )
    preview = Preview()
    preview.add([of_crash, of_hang, _letter()])
    names = [group.error_type for group in preview.groups]
    assert names == ["its process ended while its handler ran", "most likely hung", "ValueError"]
    for letter, name in ((of_crash, names[0]), (of_hang, names[1])):
        assert [one for one in (of_crash, of_hang) if LetterFilter(error=name).fits(one)] == [letter]
    assert _letter(error_type=b"", error=b"", reason=b"body_gone").error_name == ""


def _raised(depth: int, text: str) -> BaseException:
    def fall(left: int) -> None:
        if left:
            fall(left - 1)
        raise ValueError(text)

    try:
        try:
            fall(depth)
        except ValueError as first:
            raise KeyError("then") from first
    except KeyError as problem:
        return problem
    raise AssertionError


def test_a_traceback_is_kept_with_its_cause_and_bounded() -> None:
    text = traced(_raised(3, "first"))
    assert "ValueError: first" in text
    assert text.rstrip().endswith("KeyError: 'then'")
    assert "in fall" in text
    for problem in (_raised(600, "deep"), _raised(1, "x" * 100_000)):
        assert len(traced(problem)) < 10_000
        assert traced(problem).rstrip().endswith("KeyError: 'then'"), "the end is where the error is"


def test_an_exception_that_cannot_even_be_shown_is_no_trouble() -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    assert "Odd" in traced(Odd())
    assert traced(ValueError("\ud800")).encode()
