from __future__ import annotations

import orjson
import pytest

from usher.common.protocol.run_log import CRASHED, DONE, RunRecord, decode, encode
from usher.consumer.policy.outcome import Finished

FINISHED = [
    Finished(b"42", b"5-1", 1_795_215_518_421_818, 1, 1_700_000_000_000_001, 1_700_000_000_000_009),
    Finished("t\u00fc \n".encode(), b"18446744073709551615-1", 7, 3, 10, 20),
]
CUT_OFF = Finished(b"42", b"6-1", 7, 2, 10, 0)


def test_what_a_consumer_notes_an_auditor_reads() -> None:
    """Fences and microseconds need more than 32 bits, and a fence may not be rounded."""
    assert list(decode(encode("c1:9", FINISHED))) == [
        RunRecord("c1:9", "42", "5-1", 1_795_215_518_421_818, 1, 1_700_000_000_000_001, 1_700_000_000_000_009),
        RunRecord("c1:9", "t\u00fc \n", "18446744073709551615-1", 7, 3, 10, 20),
    ]


def test_outcomes_are_told_where_not_all_is_done() -> None:
    assert b"outcomes" not in encode("c1:9", FINISHED)
    assert [run.outcome for run in decode(encode("c1:9", FINISHED))] == [DONE, DONE]
    assert b'"outcomes":["done","done","crashed"]' in encode("c1:9", [*FINISHED, CUT_OFF], [DONE, DONE, CRASHED])
    assert [(run.outcome, run.end_us) for run in decode(encode("c1:9", [CUT_OFF], [CRASHED]))] == [(CRASHED, 0)]


def test_a_record_is_one_object_of_columns() -> None:
    encoded = encode("c1:9", FINISHED)
    assert b'"fences":[1795215518421818,7]' in encoded
    record = orjson.loads(encoded)
    assert record["consumer"] == "c1:9"
    assert {name: len(column) for name, column in record.items() if name != "consumer"} == dict.fromkeys(
        ("ids", "tickets", "fences", "attempts", "start_us", "end_us"), 2
    )


def test_a_record_whose_columns_differ_in_length_is_refused() -> None:
    record = orjson.loads(encode("c1:9", FINISHED))
    record["fences"].pop()
    with pytest.raises(ValueError, match="shorter"):
        list(decode(orjson.dumps(record)))
