"""Files that are read again: when they are others, when we may read them at last, and once more after a while."""

from __future__ import annotations

import os
import resource
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.tls_front import Papers
from usher.common.http import credentials
from usher.common.http.credentials import Credentials, FileValue, Identity, Role, digest_of, line_of
from usher.common.http.serve import ServerTls


@contextmanager
def no_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(credentials, "now_s", lambda: now[0])
    return now


class Made:
    """A value of files, how often it was made, and what was told."""

    def __init__(self, *files: Path) -> None:
        self.fails = False
        self.count = 0
        self.told: list[str] = []
        self.value = FileValue(
            files, self._make, lambda unfit: self.told.append("new" if unfit is None else str(unfit))
        )

    def _make(self) -> int:
        if self.fails:
            raise OSError("unfit")
        self.count += 1
        return self.count

    def is_new(self) -> bool:
        before = self.count
        return self.value.get() != before


def test_what_has_not_changed_is_not_read_again(tmp_path: Path, clock: list[float]) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("1")
    made = Made(one, two)
    clock[0] += 1e6
    assert not made.is_new()
    two.write_text("2")
    assert made.is_new()
    assert not made.is_new()
    one.unlink()
    assert made.is_new()
    clock[0] += 1e6
    assert not made.is_new()
    assert made.told == ["new", "new"]


def test_a_file_that_gets_another_mode_or_owner_is_read_again(tmp_path: Path, clock: list[float]) -> None:
    """root writes a key, and gives it to us a moment later: neither text nor time of the text change by that."""
    key = tmp_path / "key"
    key.write_text("secret")
    key.chmod(0o400)
    made = Made(key)
    key.chmod(0o600)
    assert made.is_new()
    assert not made.is_new()


def test_a_text_of_the_same_size_and_time_is_another_one(tmp_path: Path, clock: list[float]) -> None:
    cert = tmp_path / "cert"
    cert.write_text("old")
    os.utime(cert, (1, 1))
    made = Made(cert)
    cert.write_text("new")
    os.utime(cert, (1, 1))
    assert made.is_new()


def test_after_a_try_that_failed_the_former_value_stays_and_the_next_try_comes_in_a_while(
    tmp_path: Path, clock: list[float]
) -> None:
    made = Made(tmp_path / "file")
    made.fails = True
    (tmp_path / "file").touch()
    assert made.value.get() == made.value.get() == 1
    assert made.told == ["unfit"]
    made.fails = False
    clock[0] += credentials._AGAIN_S - 1
    assert not made.is_new()
    clock[0] += 2
    assert made.is_new()
    clock[0] += 1e6
    assert not made.is_new(), "it was read"


def test_a_token_that_was_taken_back_while_no_descriptor_was_left_ends_all_the_same(
    tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(credentials, "_LOOK_S", 0.0)
    file = tmp_path / "tokens"
    file.touch(mode=0o600)
    file.write_text(line_of(Role.OPERATOR, "ann", "one"))
    known = Credentials("", file)
    file.write_text(line_of(Role.OPERATOR, "bob", "another"))
    with no_descriptors():
        assert known.known.get().get(known.seal(digest_of("one"))) is not None
    clock[0] += 100
    assert known.known.get().get(known.seal(digest_of("one"))) is None
    assert known.known.get().get(known.seal(digest_of("another"))) == Identity(Role.OPERATOR, "bob")


def test_papers_that_were_renewed_while_no_descriptor_was_left_are_taken_up_later(
    tmp_path: Path, clock: list[float]
) -> None:
    papers = Papers(tmp_path)
    tls = ServerTls(papers.cert, papers.key)
    first: ssl.SSLContext = tls.get()
    os.utime(papers.cert)
    with no_descriptors():
        assert tls.get() is first
    assert tls.get() is first, "not at once"
    clock[0] += 100
    second = tls.get()
    assert second is not first
    assert tls.get() is second
