"""Sending into a real Redis, and telling the truth when it breaks half-way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.proxy import Proxy
from tests.topologies import until
from usher.common.cli.send import incidents
from usher.common.redis.client import Link

ROOT = Path(__file__).resolve().parents[2]
STREAM = "ticket_stream"


def usher_send(url: str, *words: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    env = {"PATH": os.environ["PATH"], "USHER_REDIS_URL": url}
    return subprocess.run(
        [sys.executable, ROOT / "usher" / "__main__.py", "send", *words],
        env=env,
        input=stdin,
        capture_output=True,
        check=False,
        timeout=60,
    )


def entries(link: Link) -> list[dict[bytes, bytes]]:
    return [dict(zip(fields[::2], fields[1::2], strict=True)) for _, fields in link.call("XRANGE", STREAM, "-", "+")]


def test_one_message(redis_url: str, link: Link) -> None:
    done = usher_send(redis_url, "--ticket", "42", "text=hello = you", "priority=3")
    assert done.returncode == 0, done.stderr
    assert entries(link) == [{b"ticket_id": b"42", b"text": b"hello = you", b"priority": b"3"}]
    ((stream_id, _),) = link.call("XRANGE", STREAM, "-", "+")
    assert done.stdout == b"1 sent to ticket_stream as %b\n" % stream_id, "of one message there is no rate"


def test_a_field_twice_and_a_time_that_delays_nothing_are_refused(redis_url: str, link: Link, tmp_path: Path) -> None:
    """The last one won, or the message was sent at once."""
    rows = tmp_path / "in.csv"
    rows.write_text("number,due_ms\nI1,4000000000000\n")
    for words, told in (
        (("--ticket", "42", "a=1", "a=2"), b"the field a is given twice"),
        (("--ticket", "42", "due_ms=4000000000000"), b"delays nothing here"),
        (("--csv", str(rows), "--key", "number"), b"delays nothing here"),
        (("--ticket", "42", "--timeout", "5s", "a=1"), b"--timeout is of --wait"),
        (("--ticket", "42", "--seed", "5", "a=1"), b"--seed is of --simulate"),
    ):
        done = usher_send(redis_url, *words)
        assert (done.returncode, told in done.stderr) == (2, True), done.stderr
    assert entries(link) == []


def test_a_simulated_workload_arrives_whole_and_in_order(redis_url: str, link: Link) -> None:
    done = usher_send(redis_url, "--simulate", "1234", "--tickets", "50", "--seed", "5", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["sent"], document["unknown"], document["error"]) == (1234, 0, None)
    assert document["messages_per_second"] > 0
    sent = [
        {b"ticket_id": message.ticket_id.encode()} | {n.encode(): v.encode() for n, v in message.fields.items()}
        for message in incidents(1234, 50, 5)
    ]
    assert entries(link) == sent
    assert done.stderr == b""


def test_a_csv_from_standard_input(redis_url: str, link: Link) -> None:
    done = usher_send(redis_url, "--csv", "-", "--key", "number", stdin=b"number,text\nI1,a\nI2,\xff\n")
    assert done.returncode == 0, done.stderr
    assert [entry[b"ticket_id"] for entry in entries(link)] == [b"I1", b"I2"]
    assert entries(link)[1][b"text"] == b"\xff"
    assert b"2 sent to ticket_stream" in done.stdout


def test_a_bad_row_stops_it_and_says_how_many_were_sent(redis_url: str, link: Link, tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text("number,text\n" + "I1,a\n" * 600 + ",b\n")
    done = usher_send(redis_url, "--csv", str(path), "--key", "number")
    assert done.returncode == 1
    assert f"{path}:602: column 'number' is empty" in done.stderr.decode()
    assert b"500 messages were certainly accepted" in done.stderr
    assert link.call("XLEN", STREAM) == 500


@pytest.mark.parametrize(
    ("words", "doing", "told"),
    [("--simulate 1000 --rate 5", b"xadd", b"certainly accepted"), ("--ticket T --wait", b"xread", b"is handled all")],
)
def test_a_program_that_is_told_to_end_says_what_was_sent(
    redis_url: str, link: Link, words: str, doing: bytes, told: bytes
) -> None:
    command = [sys.executable, ROOT / "usher" / "__main__.py", "send", *words.split()]
    with subprocess.Popen(command, env={**os.environ, "USHER_REDIS_URL": redis_url}, stderr=subprocess.PIPE) as sending:
        until(lambda: link.call("XLEN", STREAM) and doing in link.call("CLIENT", "LIST"), "the first one")
        sending.terminate()
        assert told in sending.communicate(timeout=30)[1] and sending.returncode == 130


def test_a_redis_that_is_not_there_is_exit_code_2_and_names_the_setting() -> None:
    done = usher_send("redis://:secret@127.0.0.1:1/0", "--simulate", "1")
    assert done.returncode == 2
    assert done.stderr.startswith(b"usher: USHER_REDIS_URL: ")
    assert b"secret" not in done.stderr


def test_of_a_batch_that_is_refused_in_its_middle_nothing_is_certain(redis_url: str, link: Link) -> None:
    link.call("XADD", STREAM, "18446744073709551615-18446744073709551614", "a", "b")  # leaves room for one more id
    done = usher_send(redis_url, "--simulate", "3", "--json")
    told = json.loads(done.stdout)
    assert (done.returncode, told["sent"], told["unknown"]) == (1, 0, 3)
    assert "smaller than the target stream" in told["error"] or "exhausted" in told["error"]


def test_a_lost_reply_is_unknown_and_not_sent_again(redis_url: str, link: Link) -> None:
    with Proxy(redis_url) as proxy:
        proxy.on_reply = lambda chunk: None if link.call("XLEN", STREAM) == 503 else chunk
        done = usher_send(proxy.url, "--simulate", "503", "--json")
    told = json.loads(done.stdout)
    assert (done.returncode, told["sent"], told["unknown"]) == (1, 500, 3)
    assert "broke before the reply" in told["error"]
    assert link.call("XLEN", STREAM) == 503


def test_a_closed_standard_input_is_told(redis_url: str) -> None:
    words = [
        sys.executable,
        str(ROOT / "usher" / "__main__.py"),
        "send",
        "--redis-url",
        redis_url,
        "--csv",
        "-",
        "--key",
        "id",
    ]
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" <&-', "sh", *words], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr.splitlines()[-1]) == (2, "usher: --csv: standard input is closed")
