"""What is sent: the made-up workload and CSV files, the good and the broken."""

from __future__ import annotations

import collections
import gzip
from pathlib import Path

import pytest

from usher.common.base.errors import StartRefused
from usher.common.cli.send import CsvSource, WorkloadUnusable, incidents, paced
from usher.common.sending.producer import BATCH, Outgoing

REAL_INCIDENTS = Path(__file__).resolve().parents[3] / "shared" / "data" / "incidents.csv.gz"


class TestIncidents:
    def test_the_same_seed_gives_the_same_messages(self) -> None:
        assert list(incidents(500, 50, 7)) == list(incidents(500, 50, 7))
        assert list(incidents(500, 50, 7)) != list(incidents(500, 50, 8))

    def test_tickets_are_skewed_as_zipf_says(self) -> None:
        counted = collections.Counter(message.ticket_id for message in incidents(20_000, 1000, 1))
        harmonic = sum(1 / rank for rank in range(1, 1001))
        hottest, count = counted.most_common(1)[0]
        assert hottest == "INC0000001"
        assert count == pytest.approx(20_000 / harmonic, rel=0.1)
        assert counted["INC0000010"] == pytest.approx(20_000 / harmonic / 10, rel=0.3)


def csv_file(folder: Path, text: str | bytes, name: str = "in.csv") -> str:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


def read(path: str, key: str = "number") -> list[Outgoing]:
    with CsvSource(path, key) as rows:
        return list(rows)


class TestCsv:
    def test_gzip_is_recognised_by_content_not_name(self, tmp_path: Path) -> None:
        packed = gzip.compress(b"number\nI1\n")
        for name in ("in.csv.gz", "oddly_named"):
            assert read(csv_file(tmp_path, packed, name)) == [Outgoing("I1", {"number": "I1"})]

    def test_a_byte_order_mark_windows_line_ends_and_empty_lines_are_fine(self, tmp_path: Path) -> None:
        assert read(csv_file(tmp_path, b"\xef\xbb\xbfnumber,t\r\nI1,x\r\n\r\nI2,y\r\n")) == [
            Outgoing("I1", {"number": "I1", "t": "x"}),
            Outgoing("I2", {"number": "I2", "t": "y"}),
        ]

    def test_bytes_that_are_not_utf8_travel_through(self, tmp_path: Path) -> None:
        (message,) = read(csv_file(tmp_path, b"number,t\nI1,\xff\xfe\n"))
        assert message.fields["t"] == b"\xff\xfe"

    def test_a_large_cell_is_a_message(self, tmp_path: Path) -> None:
        """Above 128 KiB it was no CSV."""
        (message,) = read(csv_file(tmp_path, "number,text\nI1," + "x" * 1_000_000 + "\n"))
        assert len(message.fields["text"]) == 1_000_000

    def test_a_line_break_in_quotes_keeps_the_line_numbers_right(self, tmp_path: Path) -> None:
        path = csv_file(tmp_path, 'number,t\nI1,"two\nlines"\n,x\n')
        with pytest.raises(WorkloadUnusable, match=r"in\.csv:4: column 'number' is empty"):
            read(path)

    @pytest.mark.parametrize(
        ("text", "told"),
        [
            ("number,t\nI1\n", r":2: has 1 columns, the header has 2"),
            ("number,t\nI1,a,b\n", r":2: has 3 columns, the header has 2"),
            ('number,t\nI1,"a\n', r":2: is not CSV"),
            (b"number,t\n\xff,a\n", r":2: column 'number' is not UTF-8"),
            ("number,t\nNULL,a\n", r":2: column 'number' is NULL, which is no key"),
            ("number,t\n" + "x" * 257 + ",a\n", r":2: column 'number' has 257 bytes"),
            (gzip.compress(b"number,t\n" + b"I1,a\n" * 50_000, mtime=0)[:-60], r":\d+: cannot be unpacked"),
        ],
    )
    def test_a_bad_row_is_named_by_file_line_and_column(self, tmp_path: Path, text: str | bytes, told: str) -> None:
        with pytest.raises(WorkloadUnusable, match=r"in\.csv" + told):
            read(csv_file(tmp_path, text))

    @pytest.mark.parametrize(
        ("text", "told"),
        [
            ("", r"--csv: .*in\.csv is empty"),
            ("a,b\n1,2\n", r"--key: .*in\.csv has no column 'number'; it has: a, b"),
            ("number,t,t\n1,2,3\n", r"in\.csv:1: column 't' appears twice"),
            ("number,ticket_id\n1,2\n", r"has a column 'ticket_id', the ticket field"),
        ],
    )
    def test_a_bad_header_is_refused_before_anything_is_sent(self, tmp_path: Path, text: str, told: str) -> None:
        with pytest.raises(StartRefused, match=told):
            CsvSource(csv_file(tmp_path, text), "number")

    def test_a_file_that_is_not_there_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(StartRefused, match=r"--csv: .*gone\.csv cannot be read: No such file"):
            CsvSource(str(tmp_path / "gone.csv"), "number")

    def test_the_key_may_be_the_ticket_field_itself(self, tmp_path: Path) -> None:
        (message,) = read(csv_file(tmp_path, "ticket_id,t\n7,x\n"), key="ticket_id")
        assert message == Outgoing("7", {"t": "x"})


class TestPacing:
    def test_batches_are_full_but_the_last(self) -> None:
        assert [len(batch) for batch in paced(incidents(1201, 5, 1))] == [BATCH, BATCH, 201]
        assert list(paced([])) == []

    def test_a_rate_is_kept_on_an_open_loop(self) -> None:
        time = [100.0]
        batch_times = []

        def sleep(seconds: float) -> None:
            time[0] += seconds

        for batch in paced(incidents(100, 5, 1), 50.0, clock=lambda: time[0], sleep=sleep):
            batch_times += [time[0] - 100.0] * len(batch)
        assert len(batch_times) == 100
        for index, when in enumerate(batch_times):
            assert index / 50 <= when + 1e-6
            assert when <= index / 50 + 0.021

    def test_a_sender_that_was_held_up_catches_up(self) -> None:
        time = [0.0]
        sizes = []
        for batch in paced(incidents(3000, 5, 1), 1000.0, clock=lambda: time[0], sleep=lambda _: None):
            sizes.append(len(batch))
            time[0] += 2.0
        assert sizes == [1, BATCH, BATCH, BATCH, BATCH, BATCH, 499]
