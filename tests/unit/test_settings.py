from __future__ import annotations

import re
import socket
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.env_example import text
from usher.common.base.errors import SettingsError
from usher.common.runtime.settings import CommonSettings, environment, is_loopback, is_secret, load, name_of, options
from usher.consumer.settings import ConsumerSettings
from usher.deploy.local.plan import LocalSettings
from usher.master.audit.settings import AuditSettings
from usher.master.cli.follow import FollowSettings
from usher.master.settings import MasterSettings, StreamerSettings

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = [*(ROOT / "common" / "cli").glob("*.py"), *(ROOT / "master" / "cli").glob("*.py")]
_CONSUMER = {"USHER_CONSUMER_NAME": "c1", "USHER_HANDLER": "m:f"}


def test_without_any_setting_a_master_has_its_defaults_and_a_consumer_wants_a_handler() -> None:
    assert load(MasterSettings, {}).group == "concurrency_stream_group"
    with pytest.raises(SettingsError) as refused:
        load(ConsumerSettings, {})
    assert refused.value.problems == ("USHER_HANDLER is not set (or give --handler)",)


def test_a_consumer_is_named_as_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for host, name in (("shop-7f9c", "shop-7f9c"), ("-my_host (1)", "my_host--1-"), ("", "consumer")):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        assert load(ConsumerSettings, {"USHER_HANDLER": "m:f"}).consumer_name == name


def test_all_that_a_pod_lacks_is_in_one_message(tmp_path: Path) -> None:
    """It took as many restarts as there were settings missing."""
    pod = {"USHER_BIND": "0.0.0.0:8721", "USHER_STATE_DIR": str(tmp_path), "USHER_CONCURRENCY": "many"}
    with pytest.raises(SettingsError) as refused:
        load(ConsumerSettings, pod)
    told = [problem.partition(" ")[0].rstrip(":") for problem in refused.value.problems]
    assert told == [
        "USHER_CONCURRENCY", "USHER_HANDLER", "USHER_API_TOKEN", "USHER_HEALTH_URL", "USHER_REDIS_URL"
    ]  # fmt: skip


def test_one_error_lists_every_bad_value() -> None:
    bad = {
        "USHER_REDIS_URL": "http://x",
        "USHER_LEASE_SECONDS": "soon",
        "USHER_BIND": "8700",
        "USHER_TIKET_STREAM": "s",
        "USHER_GROUP": "a b",
    }
    with pytest.raises(SettingsError) as refused:
        load(MasterSettings, bad)
    told = "\n".join(refused.value.problems)
    for name in ("USHER_REDIS_URL", "USHER_LEASE_SECONDS", "USHER_BIND", "USHER_GROUP"):
        assert f"{name}:" in told
    assert "USHER_TIKET_STREAM is not a setting; did you mean USHER_TICKET_STREAM?" in told
    assert len(refused.value.problems) == 5


def test_an_empty_path_is_none_as_its_description_says() -> None:
    """It was the current folder."""
    settings = load(MasterSettings, {"USHER_TLS_CERT": "", "USHER_TOKENS_FILE": "", "USHER_STATE_DIR": ""})
    assert (settings.tls_cert, settings.tokens_file) == (None, None)
    assert settings.state_dir == MasterSettings.model_fields["state_dir"].default


def test_the_example_of_an_environment_can_be_used_as_it_stands() -> None:
    """It said None, which is the name of a file."""
    lines = [line[1:] for line in text().splitlines() if re.match("#USHER_[A-Z_]+=", line)]
    shown = dict(line.split("=", 1) for line in reversed(lines))  # USHER_BIND is twice in it, first of a master
    assert len(shown) > 30 and "None" not in shown.values()
    names = {name_of(field) for field in MasterSettings.model_fields}
    settings = load(MasterSettings, {name: shown[name] for name in shown if name in names})
    assert settings.model_dump() == load(MasterSettings, {}).model_dump()


def test_a_handler_may_not_run_for_ever() -> None:
    with pytest.raises(SettingsError, match="USHER_HANDLER_SECONDS"):
        load(ConsumerSettings, {"USHER_HANDLER": "a:b", "USHER_CONSUMER_NAME": "c", "USHER_HANDLER_SECONDS": "inf"})


def test_a_bad_value_is_shown_unless_it_may_hold_a_secret() -> None:
    with pytest.raises(SettingsError, match="it is 'soon'"):
        load(MasterSettings, {"USHER_LEASE_SECONDS": "soon"})
    with pytest.raises(SettingsError) as refused:
        load(MasterSettings, {"USHER_REDIS_URL": "rediss//:secret@host"})
    assert "secret" not in str(refused.value)


def test_names_of_other_programs_are_left_alone_and_lookalikes_are_not() -> None:
    load(MasterSettings, {"USHER_SOMETHING_ELSE_ENTIRELY": "1", "USHER_CONSUMERS": "3", "HOME": "/"})
    with pytest.raises(SettingsError, match="did you mean USHER_API_TOKEN"):
        load(MasterSettings, {"USHER_API_TOKENS": "x"})


def test_no_program_takes_the_setting_of_another_one_for_a_mistyped_one() -> None:
    """All get the same environment: a master refused to start since a consumer has USHER_HANDLER_SECONDS."""
    programs: tuple[type[CommonSettings], ...] = (MasterSettings, StreamerSettings, ConsumerSettings)
    for cls in programs:
        others = {name_of(field) for other in programs for field in other.model_fields} - {
            *map(name_of, cls.model_fields)
        }
        try:
            load(cls, dict.fromkeys(others, "1"))
        except SettingsError as refused:
            assert "did you mean" not in str(refused)


def test_a_flag_wins_over_the_environment_and_a_flag_not_given_does_not() -> None:
    environ = {"USHER_GROUP": "from_environment"}
    assert load(MasterSettings, environ, {"group": "from_flag"}).group == "from_flag"
    assert load(MasterSettings, environ, {"group": None}).group == "from_environment"


@pytest.mark.parametrize("url", ["redis://h", "rediss://u:p@h:1/2", "unix:///tmp/s", ""])
def test_redis_urls(url: str) -> None:
    assert load(MasterSettings, {"USHER_REDIS_URL": url}).redis_url == url


@pytest.mark.parametrize("name", ["c:1", "../c", "c\n", "-c", "c" * 65])
def test_a_consumer_name_that_could_not_be_told_from_an_incarnation_or_a_path_is_refused(name: str) -> None:
    with pytest.raises(SettingsError, match="USHER_CONSUMER_NAME"):
        load(ConsumerSettings, _CONSUMER | {"USHER_CONSUMER_NAME": name})


@pytest.mark.parametrize("value", ["host", ":1", "h:", "h:x", "h:65536", "h:-1"])
def test_addresses_that_are_none(value: str) -> None:
    with pytest.raises(SettingsError, match="USHER_BIND: must look like"):
        load(MasterSettings, {"USHER_BIND": value})


@pytest.mark.parametrize("value", ["", "127.0.0.1:8700", "http://a,", "ftp://a"])
def test_master_urls_that_are_none(value: str) -> None:
    with pytest.raises(SettingsError, match="USHER_MASTER_URLS"):
        load(ConsumerSettings, _CONSUMER | {"USHER_MASTER_URLS": value})


@pytest.mark.parametrize("address", ["127.0.0.1:0", "127.8.0.1:1", "[::1]:1", "localhost:1"])
def test_reachable_from_this_machine_only(address: str) -> None:
    assert is_loopback(address)


@pytest.mark.parametrize("address", ["0.0.0.0:1", "[::]:1", "10.0.0.1:1", "host:1", "localhost.example:1"])
def test_reachable_from_elsewhere(address: str) -> None:
    assert not is_loopback(address)


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        load(MasterSettings, {}).group = "other"  # type: ignore[misc]


def test_the_state_folder_is_in_the_home_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load(MasterSettings, {"USHER_STATE_DIR": "~/state"}).state_folder == tmp_path / "state"


@given(
    lease=st.floats(0.5, 3600),
    most=st.integers(0, 2000),
    archived=st.booleans(),
    stream=st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="{},*?"), min_size=1, max_size=50),
)
def test_what_is_handed_to_a_child_program_reads_back_the_same(
    lease: float, most: int, archived: bool, stream: str
) -> None:
    settings = MasterSettings(
        lease_seconds=lease, backlog_limit=most, trim_archived=archived, ticket_stream=stream, state_dir=Path("/x y")
    )
    assert load(MasterSettings, environment(settings)) == settings


def test_a_command_gets_its_flags_as_one_dict_and_help_tells_default_and_variable() -> None:
    seen = {}

    @click.command()
    @click.argument("file")
    @options(MasterSettings)
    def command(flags: dict[str, object], file: str) -> None:
        seen.update(flags, file=file)

    assert CliRunner().invoke(command, ["f", "--lease-seconds", "3"]).exit_code == 0
    assert seen["lease_seconds"] == "3"
    assert seen["group"] is None
    assert seen["file"] == "f"
    told = " ".join(CliRunner().invoke(command, ["--help"], terminal_width=1000).output.split())
    assert "--lease-seconds" in told
    assert "[default: 10.0] [USHER_LEASE_SECONDS]" in told


def _help(cls: type[CommonSettings]) -> str:
    @click.command()
    @options(cls)
    def command(flags: dict[str, object]) -> None:
        pass

    return " ".join(CliRunner().invoke(command, ["--help"], terminal_width=1000).output.split())


@pytest.mark.parametrize(
    ("cls", "told"),
    [
        (MasterSettings, "--lease-seconds SECONDS Life"),
        (MasterSettings, "--redis-url URL Redis"),
        (
            MasterSettings,
            (
                "--tls-cert PATH Certificate chain (PEM) for HTTPS; read again when it has changed. Empty: plain HTTP."
                " [USHER_TLS_CERT]"
            ),
        ),
        (MasterSettings, "--tokens-file PATH File"),
        (MasterSettings, "--bind HOST:PORT Where"),
        (ConsumerSettings, "--handler MODULE:FUNCTION The"),
        (ConsumerSettings, "--consumer-name TEXT This"),
        (AuditSettings, "--audit-every-minutes MINUTES Time"),
    ],
)
def test_help_says_what_a_setting_takes(cls: type[CommonSettings], told: str) -> None:
    assert told in _help(cls)
    assert "[default: None]" not in _help(cls)


@pytest.mark.parametrize("value", ["on", "off"])
def test_what_help_offers_for_a_switch_is_taken(value: str) -> None:
    assert load(MasterSettings, {}, {"trim_archived": value}).trim_archived is (value == "on")
    assert load(MasterSettings, {"USHER_TRIM_ARCHIVED": value}).trim_archived is (value == "on")


@pytest.mark.parametrize(
    "cls",
    [CommonSettings, MasterSettings, ConsumerSettings, StreamerSettings, AuditSettings, LocalSettings, FollowSettings],
)
def test_help_lists_what_is_read_and_all_flags_are_taken(cls: type[CommonSettings]) -> None:
    seen: dict[str, object] = {}

    @click.command()
    @options(cls)
    def command(flags: dict[str, object]) -> None:
        seen.update(flags)

    assert set(cls.model_fields) >= cls.UNREAD
    for field in cls.model_fields:
        if is_secret(field):
            continue
        flag = f"--{field.replace('_', '-')}"
        assert (f" {flag} " in _help(cls)) == (field not in cls.UNREAD), flag
        assert CliRunner().invoke(command, [flag, "7"]).exit_code == 0
        assert seen[field] == "7"


#: The programs of these classes, or what of them reads settings; and of CommonSettings all commands that have no class
#: of their own.
_READERS = {
    CommonSettings: (
        [path for path in COMMANDS if "@options(CommonSettings)" in path.read_text()] + [ROOT / "master/cli/shared.py"]
    ),
    StreamerSettings: [ROOT / "master/streamer/cli.py", ROOT / "master/streamer/program.py"],
    AuditSettings: [
        ROOT / "master/audit/cli.py",
        ROOT / "master/audit/archive_cli.py",
        ROOT / "master/audit/settings.py",
    ],
    LocalSettings: [ROOT / "deploy/local/up.py", ROOT / "deploy/local/plan.py"],
    FollowSettings: [ROOT / "master/cli/follow.py"],
}


@pytest.mark.parametrize("cls", _READERS)
def test_what_help_does_not_list_is_not_read(cls: type[CommonSettings]) -> None:
    read = {
        (path.name, name) for path in _READERS[cls] for name in re.findall(r"settings\.([a-z_]+)", path.read_text())
    }
    assert read, "it looks at the right files"
    # Read to say that it cannot be used here; and by `explain`, whose own settings list it.
    refused = {("up.py", "tls_cert"), ("tickets.py", "tls_ca")}
    assert {(path, name) for path, name in read if name in cls.UNREAD} <= refused


@pytest.mark.parametrize("cls", [CommonSettings, MasterSettings, ConsumerSettings])
def test_every_field_says_what_it_is(cls: type[CommonSettings]) -> None:
    for field, info in cls.model_fields.items():
        assert info.description, name_of(field)
        assert info.description.endswith("."), name_of(field)
