from __future__ import annotations

import pytest

from usher.common.protocol.registration import NAME, NO_LOCK, Registration, name_of, parse

_REGISTRATION = Registration(
    "c1", "3f2b", "http://127.0.0.1:4711/api/health", slots=8, capacity=2000, lock="boot:2049:77:900", generation=7
)


def test_what_is_stored_reads_back() -> None:
    assert parse(b"c1", _REGISTRATION.dump()) == _REGISTRATION


def test_without_a_lock_it_says_so_and_reads_back() -> None:
    plain = Registration("c1", "3f2b", "http://127.0.0.1:4711/api/health", 8, 2000)
    assert plain.dump().split()[4].decode() == NO_LOCK
    assert parse(b"c1", plain.dump()) == plain


def test_an_incarnation_is_name_and_generation_and_gives_the_name_back() -> None:
    assert _REGISTRATION.incarnation == "c1:7"
    assert _REGISTRATION.with_generation(8).incarnation == "c1:8"
    assert name_of("c1:7") == "c1"


@pytest.mark.parametrize(
    "stored", [b"", b"7", b"x 3f2b 8 2000 - http://h", b"7 3f2b 8 2000 -", b"7 3f2b eight 2000 - http://h", b"\xff\xfe"]
)
def test_what_is_not_ours_is_refused(stored: bytes) -> None:
    with pytest.raises(ValueError):
        parse(b"c1", stored)


@pytest.mark.parametrize("name", ["c1", "a", "host-1.example_2", "A" * 64])
def test_good_names(name: str) -> None:
    assert NAME.fullmatch(name)


@pytest.mark.parametrize("name", ["", "c:1", "-c", ".", "../c", "a b", "c\n", "ü", "A" * 65])
def test_bad_names(name: str) -> None:
    assert not NAME.fullmatch(name)
