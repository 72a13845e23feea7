from __future__ import annotations

import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from tests.env_example import text
from usher.common.base.errors import SettingsError
from usher.common.runtime.settings import CommonSettings, environment, load, name_of, options
from usher.consumer.settings import ConsumerSettings
from usher.master.audit.settings import AuditSettings
from usher.master.leader.limits import limits_of
from usher.master.settings import MasterSettings, StreamerSettings

ROOT = Path(__file__).resolve().parents[2]
_CONSUMER = {"USHER_CONSUMER_NAME": "c1", "USHER_HANDLER": "m:f"}


def test_without_any_setting_a_master_has_its_defaults_and_a_consumer_wants_a_handler() -> None:
    assert load(MasterSettings, {}).group == "concurrency_stream_group"
    with pytest.raises(SettingsError) as refused:
        load(ConsumerSettings, {})
    assert refused.value.problems == ("USHER_HANDLER is not set (or give --handler)",)


def test_all_that_a_pod_lacks_is_in_one_message(tmp_path: Path) -> None:
    """It took as many restarts as there were settings missing."""
    pod = {"USHER_BIND": "0.0.0.0:8721", "USHER_STATE_DIR": str(tmp_path), "USHER_CONCURRENCY": "many"}
    with pytest.raises(SettingsError) as refused:
        load(ConsumerSettings, pod)
    told = [problem.partition(" ")[0].rstrip(":") for problem in refused.value.problems]
    assert told == [
        "USHER_CONCURRENCY", "USHER_HANDLER", "USHER_API_TOKEN", "USHER_ADVERTISE_URL", "USHER_REDIS_URL"
    ]  # fmt: skip


def test_one_error_lists_every_bad_value() -> None:
    bad = {"USHER_REDIS_URL": "http://x", "USHER_LEASE_SECONDS": "soon", "USHER_BIND": "8700"}
    bad |= {"USHER_TIKET_STREAM": "s", "USHER_GROUP": "a b"}
    with pytest.raises(SettingsError) as refused:
        load(MasterSettings, bad)
    told = "\n".join(refused.value.problems)
    for name in ("USHER_REDIS_URL", "USHER_LEASE_SECONDS", "USHER_BIND", "USHER_GROUP"):
        assert f"{name}:" in told
    assert "USHER_TIKET_STREAM is not a setting; did you mean USHER_TICKET_STREAM?" in told
    assert len(refused.value.problems) == 5


def test_an_empty_variable_is_as_one_that_is_not_set_and_an_empty_flag_says_that_there_is_none() -> None:
    names = [name_of(field) for field in MasterSettings.model_fields]
    assert load(MasterSettings, dict.fromkeys(names, "")) == load(MasterSettings, {})
    given = load(
        MasterSettings, {"USHER_TLS_CERT": "/a", "USHER_REDIS_URL": "redis://h"}, {"tls_cert": "", "redis_url": ""}
    )
    assert (given.tls_cert, given.redis_url) == (None, "")


def test_secrets_are_read_from_files_too_and_a_variable_wins(tmp_path: Path) -> None:
    (tmp_path / "usher_api_token").write_text("of a file\n")
    (tmp_path / "usher_webhook_secret").write_text("of a file\n")
    settings = load(CommonSettings, {"CREDENTIALS_DIRECTORY": str(tmp_path), "USHER_WEBHOOK_SECRET": "of a variable"})
    assert (settings.api_token, settings.webhook_secret) == ("of a file", "of a variable")


def test_the_example_of_an_environment_can_be_used_as_it_stands() -> None:
    """It said None, which is the name of a file."""
    lines = [line[1:] for line in text().splitlines() if re.match("#USHER_[A-Z_]+=", line)]
    shown = dict(line.split("=", 1) for line in reversed(lines))  # USHER_BIND is twice in it, first of a master
    assert len(shown) > 30 and "None" not in shown.values()
    names = {name_of(field) for field in MasterSettings.model_fields}
    settings = load(MasterSettings, {name: shown[name] for name in shown if name in names})
    assert settings.model_dump() == load(MasterSettings, {}).model_dump()


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


@pytest.mark.parametrize("name", ["c:1", "../c", "c\n", "-c", "c" * 65])
def test_a_consumer_name_that_could_not_be_told_from_an_incarnation_or_a_path_is_refused(name: str) -> None:
    with pytest.raises(SettingsError, match="USHER_CONSUMER_NAME"):
        load(ConsumerSettings, _CONSUMER | {"USHER_CONSUMER_NAME": name})


@pytest.mark.parametrize("value", ["host", ":1", "h:", "h:x", "h:65536", "h:-1"])
def test_addresses_that_are_none(value: str) -> None:
    with pytest.raises(SettingsError, match="USHER_BIND: must look like"):
        load(MasterSettings, {"USHER_BIND": value})


@pytest.mark.parametrize("value", ["127.0.0.1:8700", "http://a,", "ftp://a"])
def test_master_urls_that_are_none(value: str) -> None:
    with pytest.raises(SettingsError, match="USHER_MASTER_URLS"):
        load(ConsumerSettings, _CONSUMER | {"USHER_MASTER_URLS": value})


@given(
    lease=st.floats(0.5, 3600),
    most=st.integers(0, 2000),
    archived=st.sampled_from(["24h", "7d archived"]),
    stream=st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="{},*?"), min_size=1, max_size=50),
)
def test_what_is_handed_to_a_child_program_reads_back_the_same(
    lease: float, most: int, archived: str, stream: str
) -> None:
    settings = MasterSettings(
        lease_seconds=lease, backlog_limit=most, trim_keep=archived, ticket_stream=stream, state_dir=Path("/x y")
    )
    assert load(MasterSettings, environment(settings)) == settings


def test_a_command_gets_its_flags_as_one_dict_and_help_tells_default_and_variable() -> None:
    seen = {}

    @click.command()
    @click.argument("file")
    @options(MasterSettings)
    def command(flags: dict[str, object], file: str) -> None:
        seen.update(flags, file=file)

    assert CliRunner().invoke(command, ["f", "--leader-lease-seconds", "3"], obj={"lease_seconds": "4"}).exit_code == 0
    assert (seen["leader_lease_seconds"], seen["lease_seconds"]) == ("3", "4")
    assert seen["group"] is None
    assert seen["file"] == "f"
    told = " ".join(CliRunner().invoke(command, ["--help"], terminal_width=1000).output.split())
    assert "--leader-lease-seconds" in told and "--group" not in told
    assert "[default: 5.0] [USHER_LEADER_LEASE_SECONDS]" in told


def test_a_message_is_idle_after_two_leases_or_as_set_and_not_before_one() -> None:
    idle_ms = [limits_of(MasterSettings(min_idle_seconds=given)).min_idle_ms for given in (0.0, 60.0)]
    assert idle_ms == [20_000, 60_000]
    with pytest.raises(SettingsError, match="USHER_MIN_IDLE_SECONDS"):
        load(MasterSettings, {"USHER_MIN_IDLE_SECONDS": "9"})


@pytest.mark.parametrize("value", ["on", "off"])
def test_what_help_offers_for_a_switch_is_taken(value: str) -> None:
    assert load(StreamerSettings, {}, {"outbox_wait_aof": value}).outbox_wait_aof is (value == "on")
    assert load(StreamerSettings, {"USHER_OUTBOX_WAIT_AOF": value}).outbox_wait_aof is (value == "on")


@pytest.mark.parametrize("cls", [CommonSettings, MasterSettings, ConsumerSettings])
def test_every_field_says_what_it_is(cls: type[CommonSettings]) -> None:
    for field, info in cls.model_fields.items():
        assert info.description, name_of(field)
        assert info.description.endswith("."), name_of(field)


@pytest.mark.parametrize("cls", [MasterSettings, StreamerSettings, AuditSettings])
def test_a_setting_has_one_default_in_all_programs(cls: type[CommonSettings]) -> None:
    """The audit called 6 of 8 attempts too many."""
    shared = (cls.model_fields.keys() & ConsumerSettings.model_fields.keys()) - {"bind"}
    assert shared
    for field in shared:
        assert cls.model_fields[field].default == ConsumerSettings.model_fields[field].default, name_of(field)
