"""Tokens: whose they are, what the file may look like, and which flags are refused."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from usher.cli import run, usher
from usher.common.base.errors import SettingsError, StartRefused
from usher.common.cli.doctor import token
from usher.common.http import credentials
from usher.common.http.app import ANY_ADDRESS
from usher.common.http.credentials import (
    Credentials,
    Identity,
    Role,
    check_reach,
    digest_of,
    line_of,
    new_token,
    read_tokens_file,
)
from usher.master.assembly.facing import hosts_of
from usher.master.settings import MasterSettings


def _file(folder: Path, text: str, mode: int = 0o600) -> Path:
    file = folder / "tokens"
    file.write_text(text)
    file.chmod(mode)
    return file


def _find(known: Credentials, token: str) -> Identity | None:
    return known.known.get().get(known.seal(digest_of(token)))


def test_a_token_of_the_file_is_found_and_no_other(tmp_path: Path) -> None:
    mine = new_token()
    file = _file(
        tmp_path,
        f"# people\n\n{line_of(Role.OPERATOR, 'ann@desk', mine)}   # until"
        f" June\n{line_of(Role.CONSUMER, 'shop-*', 'ä b')}\n",
    )
    known = Credentials("all", file)
    assert _find(known, mine) == Identity(Role.OPERATOR, "ann@desk")
    assert _find(known, "ä b") == Identity(Role.CONSUMER, "shop-*")
    assert _find(known, "all") == Identity(Role.ALL, "api-token")
    for wrong in ("", mine + "x", mine[:-1], digest_of(mine), known.seal(digest_of(mine)), "\udcff"):
        assert _find(known, wrong) is None


def test_names_that_a_proxy_may_give_have_lines_of_their_own(tmp_path: Path) -> None:
    token = line_of(Role.OPERATOR, "vera", "t")
    known = Credentials("", _file(tmp_path, f"viewer * sign-on\noperator ann@example.org sign-on\n{token}\n"))
    assert known.person("ann@example.org") == Identity(Role.OPERATOR, "sign-on:ann@example.org")
    assert known.person("vera") == Identity(Role.VIEWER, "sign-on:vera"), "not the token of that name"
    assert len(known.people) == 2
    named = Credentials("", _file(tmp_path, "viewer vera sign-on"))
    assert [named.person(name).role for name in ("vera", "eve", "*")] == [Role.VIEWER, Role.ANYBODY, Role.ANYBODY]


def test_the_file_is_read_again_when_it_has_changed_and_one_that_is_broken_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(credentials, "_LOOK_S", 0.0)
    file = _file(tmp_path, line_of(Role.VIEWER, "ann", "one"))
    known = Credentials("", file)
    _file(tmp_path, line_of(Role.OPERATOR, "ann", "two two") + "\n")
    assert _find(known, "one") is None
    assert _find(known, "two two") == Identity(Role.OPERATOR, "ann")
    _file(tmp_path, "nonsense")
    assert _find(known, "two two") is not None
    file.unlink()
    assert _find(known, "two two") is not None
    _file(tmp_path, line_of(Role.VIEWER, "ann", "three"))
    assert _find(known, "three") == Identity(Role.VIEWER, "ann")
    assert _find(known, "two two") is None


@pytest.mark.parametrize(
    "line",
    [
        *(
            "viewer ann",
            "viewer ann x",
            "all ann sign-on",
            "viewer a,b sign-on",
            "anybody ann " + "0" * 64,
            "viewer a/b " + "0" * 64,
            "viewer ann " + "A" * 64,
        ),
        *("viewer ann* " + "0" * 64, "consumer a*b " + "0" * 64, "viewer ann " + "0" * 64 + " more", "\udcff"),
    ],
)
def test_a_line_that_is_none_is_told_by_its_number_only(tmp_path: Path, line: str) -> None:
    file = tmp_path / "tokens"
    file.write_bytes(b"# first\n" + line.encode("utf-8", "surrogateescape"))
    file.chmod(0o600)
    with pytest.raises(SettingsError) as wrong:
        read_tokens_file(file)
    assert len(wrong.value.problems) == 1
    assert "line 2 of" in str(wrong.value)
    assert "0" * 64 not in str(wrong.value)


def test_a_token_that_stands_twice_is_refused(tmp_path: Path) -> None:
    lines = f"{line_of(Role.VIEWER, 'ann', 'x')}\n{line_of(Role.OPERATOR, 'ben', 'x')}\n"
    with pytest.raises(SettingsError, match="line 2 .* earlier line"):
        read_tokens_file(_file(tmp_path, lines))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o777])
def test_a_file_that_others_may_touch_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(SettingsError, match="chmod 600"):
        read_tokens_file(_file(tmp_path, "", mode))


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read: No such file"):
        Credentials("", tmp_path / "none")


def test_two_masters_make_the_same_sessions_and_without_a_set_token_none_outlives_a_start() -> None:
    one, other = (Credentials("t") for _ in range(2))
    assert one.key == other.key
    assert one.key != Credentials("u").key
    assert Credentials().key != Credentials().key


@pytest.mark.parametrize(
    ("bind", "is_refused"),
    [
        *((bind, False) for bind in ("127.0.0.1:0", "127.8.0.1:1", "localhost:1", "[::1]:1")),
        *((bind, True) for bind in ("0.0.0.0:1", "[::]:1", "10.0.0.1:1", "somewhere:1", "localhost.example:1")),
    ],
)
def test_beyond_loopback_a_token_is_asked_for_that_cannot_be_guessed(bind: str, is_refused: bool) -> None:
    check_reach(bind, "0123456789abcdef", None)
    check_reach(bind, "", Path("tokens"))
    for short, why in (("", "must be set .*`usher token new`"), ("letmein", "a token of 7 characters.*at least 16")):
        with pytest.raises(StartRefused, match=why) if is_refused else contextlib.nullcontext():
            check_reach(bind, short, None)


def test_a_master_does_not_start_beyond_loopback_without_a_token(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in os.environ if name.startswith("USHER_")]:
        monkeypatch.delenv(name)
    assert run(["master", "--bind", "0.0.0.0:0"]) == 2
    assert "USHER_API_TOKEN or USHER_TOKENS_FILE must be set to listen on 0.0.0.0:0" in capsys.readouterr().err


def test_a_token_on_the_command_line_is_refused_and_not_repeated() -> None:
    done = CliRunner().invoke(usher, ["master", "--api-token", "canary"])
    assert done.exit_code == 2
    assert "set USHER_API_TOKEN" in done.output
    assert "canary" not in done.output


@pytest.mark.parametrize(
    ("given", "hosts"),
    [
        ({}, {"localhost", "127.0.0.1", ANY_ADDRESS}),
        ({"bind": "127.0.0.5:1", "advertise_url": "http://me:1"}, {"localhost", "127.0.0.5", "me", ANY_ADDRESS}),
        ({"api_token": "x"}, set()),
        ({"bind": "0.0.0.0:1"}, set()),
        ({"hosts": "a, [::2] ,", "api_token": "x"}, {"a", "::2"}),
    ],
)
def test_without_a_token_only_this_machines_names_are_answered(given: dict[str, str], hosts: set[str]) -> None:
    assert set(hosts_of(MasterSettings(**given))) == hosts  # type: ignore[arg-type]


def test_the_command_prints_a_token_and_its_line(tmp_path: Path) -> None:
    done = CliRunner().invoke(usher, ["token", "new", "consumer", "shop-*", "--json"])
    made = json.loads(done.output)
    known = Credentials("", _file(tmp_path, made["line"]))
    assert _find(known, made["token"]) == Identity(Role.CONSUMER, "shop-*")
    assert CliRunner().invoke(token, ["new", "viewer", "shop-*"]).exit_code == 2
