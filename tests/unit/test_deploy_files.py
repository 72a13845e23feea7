"""What `usher init-deploy` refuses and writes, and whether the files of deploy/ fit each other. Nothing is started."""

from __future__ import annotations

import configparser
import getpass
import os
import re
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from usher.cli import COMMANDS, load_command
from usher.common.base.errors import SettingsError, StartRefused, UsherError
from usher.common.http.credentials import Role, line_of
from usher.common.redis.acl import USERS, acl_file
from usher.consumer.settings import ConsumerSettings
from usher.deploy.local.deploy_folder import AROUND_DRAIN_S, DEPLOY, Host
from usher.deploy.local.init_deploy import plan
from usher.deploy.local.plan import LocalSettings

_ASKED: dict[str, Any] = {
    "host": "127.0.0.1",
    "masters": None,
    "consumers": 2,
    "handler": "shop:handle",
    "health_port": 8721,
    "redis_port": 6390,
    "users": (getpass.getuser(),),
}
_ELSEWHERE = {"USHER_REDIS_URL": "redis://:pw@10.0.0.9:6379/0", "USHER_API_TOKEN": "token"}


@pytest.fixture(autouse=True)
def _programs_accept_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process for each of these tests would take a second; tests/process/test_init_deploy.py asks the real ones."""
    monkeypatch.setattr("usher.deploy.local.init_deploy.check_programs", lambda environ, folder=None: None)


def planned(*roles: str, folder: str = "/srv/usher", environ: dict[str, str] | None = None, **asked: Any) -> Host:
    return plan(Path(folder), roles or ("all",), _ASKED | asked, environ or {})


def sections(host: Host) -> dict[str, dict[str, str]]:
    parser = configparser.RawConfigParser(inline_comment_prefixes=(" ;",))
    parser.read_string(host.files()["supervisord.conf"][0])
    return {name: dict(parser[name]) for name in parser.sections()}


def test_what_is_generated_is_new_each_time_and_what_is_given_is_kept() -> None:
    one, other = planned(), planned()
    for name in ("USHER_API_TOKEN", "USHER_REDIS_URL"):
        assert one.settings[name] != other.settings[name]
        assert planned(environ=dict(one.settings)).settings[name] == one.settings[name], (
            "again, with usher.env in the environment"
        )
    assert planned(environ=dict(one.settings)).roles == one.roles
    assert set(planned(environ=_ELSEWHERE).files()) == set(one.files()) - {"redis.conf", "users.acl"}


def test_settings_of_the_environment_are_kept_but_for_those_of_one_program() -> None:
    environ = {
        "USHER_LEASE_SECONDS": "7",
        "USHER_BIND": "127.0.0.1:1",
        "USHER_CONSUMER_NAME": "x",
        "USHER_STATE_DIR": "/elsewhere",
        "HOME": "/",
    }
    settings = planned(environ=environ).settings
    assert settings["USHER_LEASE_SECONDS"] == "7"
    assert settings["USHER_STATE_DIR"] == "/srv/usher/state"
    assert not {"USHER_BIND", "USHER_CONSUMER_NAME", "HOME"} & settings.keys()


def test_the_python_path_of_the_environment_is_kept_and_holds_in_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    kept = planned(environ={"PYTHONPATH": "shop::/srv/lib"})
    assert f"PYTHONPATH='{tmp_path}/shop:/srv/lib'\n" in kept.files()["usher.env"][0]
    assert "PYTHONPATH" not in planned(environ={"PYTHONPATH": ""}).settings


def test_a_redis_of_our_own_has_a_user_for_each_kind_of_program() -> None:
    host = planned()
    files = host.files()
    acl, mode = files["users.acl"]
    assert (mode, files["redis.conf"][1]) == (0o600, 0o600)
    assert set(re.findall(r"^user (\w+) on resetpass #[0-9a-f]{64} ", acl, re.MULTILINE)) == set(USERS)
    assert "requirepass" not in files["redis.conf"][0].partition("# ---- this host")[2]
    urls = [host.settings["USHER_REDIS_URL"], *host.redis_users.values()]
    passwords = {urlsplit(url).password or "" for url in urls}
    assert len(passwords) == len(USERS)
    for name, (text, mode) in files.items():
        if mode & 0o077 or name == "users.acl":
            assert not [secret for secret in passwords if secret in text], name
    again = planned(
        environ=dict(host.settings) | {f"REDIS_URL_{user.upper()}": url for user, url in host.redis_users.items()}
    )
    assert again.files()["users.acl"] == files["users.acl"], "with usher.env in the environment nothing changes"


def secrets_of(env: str) -> dict[str, str]:
    return {
        name: value
        for name, value in re.findall(r"^(\w+)='(.*)'$", env, re.MULTILINE)
        if "TOKEN" in name or "REDIS" in name
    }


def test_programs_of_a_role_are_told_their_own_secrets_and_no_other() -> None:
    """Consumers, and so their handlers, saw the token of programs and, in usher.env, all others."""
    first = planned(environ={"USHER_HEALTH_HOSTS": "10.0.0.0/24"})
    files, settings = first.files(), first.settings
    assert sections(first)["program:consumer-1"]["command"].startswith("%(here)s/as consumer ")
    of_consumers = {
        "USHER_API_TOKEN": settings["TOKEN_CONSUMER"],
        "USHER_REDIS_URL": first.redis_users["consumer"],
        "USHER_REDIS_SERVER": settings["USHER_REDIS_SERVER"],
    }
    assert secrets_of(files["consumer.env"][0]) == of_consumers
    assert not [name for name in secrets_of(files["master.env"][0]) if name.startswith("REDIS_URL_")]
    assert {mode for name, (_, mode) in files.items() if name.endswith(".env")} == {0o600}
    env = dict(settings) | {f"REDIS_URL_{user.upper()}": url for user, url in first.redis_users.items()}
    for known in (env, dict(re.findall(r"^(\w+)='(.*)'$", files["consumer.env"][0], re.MULTILINE))):
        other = planned("consumer", environ=known, host="10.0.0.3", masters="http://10.0.0.1:8700")
        for name in ("usher.env", "consumer.env"):
            assert secrets_of(other.files()[name][0]) == of_consumers, "on a host of their own too"


def test_each_role_has_a_user_of_its_own_and_root_is_never_chosen_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    host = planned(users=("redis=daemon", "master=bin", "consumer=nobody"))
    assert [found.get("user") for name, found in sections(host).items() if name.startswith("program:")] == [
        "daemon", "bin", "bin", "nobody", "nobody"
    ]  # fmt: skip
    assert "--user redis=daemon --user master=bin --user consumer=nobody" in host.again()
    with pytest.raises(StartRefused, match="has no user usher-redis, usher-master, usher-consumer; make them .useradd"):
        planned(users=())
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(StartRefused, match="only root can"):
        planned(users=("nobody",))


def test_redis_speaks_tls_where_programs_do_and_others_can_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its passwords went through the network as plain text beside HTTPS."""
    monkeypatch.setattr("usher.deploy.local.init_deploy._check_tls", lambda server: None)  # of 6.2: without TLS
    tls = {"USHER_TLS_CERT": "/etc/c.pem", "USHER_TLS_KEY": "/etc/k.pem", "USHER_TLS_CA": "/etc/ca.pem"}
    host = planned(environ=tls, host="10.0.0.1")
    urls = {**host.redis_users, "master": host.redis_url}
    assert {url.partition("@")[2] for url in urls.values()} == {"10.0.0.1:6390/0?ssl_ca_certs=/etc/ca.pem"}
    assert {urlsplit(url).scheme for url in urls.values()} == {"rediss"}
    assert "port 0\ntls-port 6390\n" in host.files()["redis.conf"][0]
    assert planned(environ=tls).redis_url.startswith("redis://"), "on loopback nobody listens"
    plain = planned(host="10.0.0.1")
    env = dict(plain.settings) | {f"REDIS_URL_{user.upper()}": url for user, url in plain.redis_users.items()}
    later = planned(environ=env | tls, host="10.0.0.1")
    assert urlsplit(later.redis_url).scheme == "rediss"
    assert urlsplit(later.redis_url).password == urlsplit(plain.redis_url).password, "certificates may come later"


def test_a_redis_without_tls_is_refused_where_programs_speak_tls(tmp_path: Path) -> None:
    server = tmp_path / "redis-server"
    server.write_text("#!/bin/sh\necho Bad directive or wrong number of arguments; exit 1\n")
    server.chmod(0o755)
    with pytest.raises(StartRefused, match="has no TLS"):
        planned(environ={"USHER_TLS_CERT": "/etc/c.pem", "USHER_REDIS_SERVER": str(server)}, host="10.0.0.1")


@pytest.mark.parametrize("odd", ["'", "\n", "\\", '"'])
def test_a_url_of_redis_that_cannot_stand_in_the_files_is_refused(odd: str) -> None:
    with pytest.raises(SettingsError, match="REDIS_URL_SENDER has a quote"):
        planned(environ=_ELSEWHERE | {"REDIS_URL_SENDER": f"redis://sender:a{odd}b@10.0.0.9:6379/0"})


@pytest.mark.parametrize("name", ["a b", "x ~* +@all ~y", "a\nuser x on nopass ~* +@all", 'a"b', "it's"])
def test_a_stream_whose_name_cannot_stand_in_a_users_file_is_refused(name: str) -> None:
    for stream, sources in ((name, ()), ("work", (name,))):
        with pytest.raises(StartRefused, match="cannot stand in an ACL file"):
            acl_file(stream, "g", sources)


def test_tokens_are_made_for_programs_operators_viewers_and_consumers() -> None:
    host = planned()
    tokens = [host.settings[name] for name in ("USHER_API_TOKEN", "TOKEN_OPERATOR", "TOKEN_VIEWER", "TOKEN_CONSUMER")]
    assert len({*tokens}) == 4 and min(map(len, tokens)) > 40
    names = ((Role.OPERATOR, "operator"), (Role.VIEWER, "viewer"), (Role.CONSUMER, "*"))
    text, mode = host.files()["tokens"]
    assert text.splitlines() == [line_of(*one, token) for one, token in zip(names, tokens[1:], strict=True)]
    assert mode == 0o600
    assert "tokens" not in planned(environ={"USHER_TOKENS_FILE": "/etc/tokens"}).files(), "there is one already"


def test_lines_that_people_have_added_to_the_tokens_are_kept() -> None:
    added = ["# people", "viewer ann " + "1" * 64]
    with tempfile.TemporaryDirectory(prefix="usher-t-", dir="/tmp") as folder:
        (Path(folder) / "tokens").write_text("\n".join(["operator operator " + "0" * 64, *added]) + "\n")
        text, _ = planned(folder=folder).files()["tokens"]
    assert text.splitlines()[3:] == added
    assert "0" * 64 not in text


def test_addresses_of_ipv6_have_brackets_where_they_must() -> None:
    host = planned(host="fd00::1")
    assert host.settings["USHER_REDIS_URL"].endswith("@[fd00::1]:6390/0")
    assert host.settings["USHER_MASTER_URLS"].startswith("http://[fd00::1]:8700,")
    assert "bind fd00::1\n" in host.files()["redis.conf"][0]
    assert "--bind '[fd00::1]:8700'" in sections(host)["program:master-1"]["command"]


@pytest.mark.parametrize(
    ("roles", "environ", "asked", "told"),
    [
        (("master",), {}, {}, "USHER_REDIS_URL"),
        (
            ("consumer",),
            {"USHER_REDIS_URL": "redis://10.0.0.9"},
            {"masters": "http://10.0.0.1:8700"},
            "USHER_API_TOKEN",
        ),
        (("consumer",), _ELSEWHERE, {}, "USHER_MASTER_URLS"),
        (("redis",), _ELSEWHERE, {}, "USHER_REDIS_URL"),
        (("master",), _ELSEWHERE, {"host": "10.0.0.1"}, "USHER_HEALTH_HOSTS"),
        (("all",), {}, {"host": "0.0.0.0"}, "--host"),
        (("all",), {}, {"host": "a b"}, "--host"),
        (("all",), {}, {"masters": "http://10.0.0.1:8700"}, "--masters"),
        (("all",), {}, {"folder": "/srv/" + "x" * 70}, "path"),
        (("all",), {}, {"folder": "/srv/a b"}, "path"),
        (("all",), {"USHER_TICKET_FIELD": "it's"}, {}, "USHER_TICKET_FIELD"),
        (("all",), {"USHER_LEASE_SECONDS": "soon"}, {}, "USHER_LEASE_SECONDS"),
    ],
)
def test_what_cannot_work_is_refused_and_named(
    roles: tuple[str, ...], environ: dict[str, str], asked: dict[str, Any], told: str
) -> None:
    with pytest.raises(UsherError, match=re.escape(told)) as refused:
        planned(*roles, environ=environ, **asked).files()
    assert isinstance(refused.value, (StartRefused, SettingsError))


def test_a_program_is_not_killed_while_it_may_still_drain() -> None:
    """supervisord must wait for longer than the program: drain, 5 s around it (consumer/__main__), and 3 s until its
    arbiter kills."""
    for drain_s in (0.0, 20.0, 100.5):
        host = planned(environ={"USHER_DRAIN_SECONDS": str(drain_s)})
        settings = LocalSettings(drain_seconds=drain_s)
        for seconds in (host.consumer_stop_seconds, settings.stop_seconds):
            assert seconds > drain_s + 5 + 3
        whole = int(re.findall(r"TimeoutStopSec=(\d+)", host.files()["usher.service"][0])[0])
        waits = {
            name: int(section["stopwaitsecs"]) for name, section in sections(host).items() if "stopwaitsecs" in section
        }
        assert whole > waits["program:consumer-1"] + waits["program:master-1"] + waits["program:redis"]
        assert waits["program:master-1"] > 10 + 3, "a master has 10 s"
    assert LocalSettings(drain_seconds=0).stop_seconds == AROUND_DRAIN_S


def test_every_alert_says_what_to_do() -> None:
    runbook = (DEPLOY / "runbook.md").read_text()
    anchors = {
        "#" + re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^## (.+)$", runbook, re.MULTILINE)
    }
    (group,) = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    assert len({rule["alert"] for rule in group["rules"]}) == len(group["rules"]) >= 15
    for rule in group["rules"]:
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["summary"].endswith(".")
        assert rule["annotations"]["runbook_url"] in anchors, rule["alert"]


def test_nobody_is_woken_for_what_handlers_or_operators_do_on_purpose() -> None:
    (group,) = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    asked = {rule["alert"]: rule["expr"] for rule in group["rules"]}
    failing = re.findall(r'usher_attempts_total\{outcome=~"([a-z_|]+)"\}', asked["UsherHandlersFail"])
    assert failing == ["failed|gave_up"], "to ask for a later call is no failure"
    for name in ("UsherStuck", "UsherOldMessage"):
        assert "usher_oldest_message_age_seconds" not in asked[name], (
            "what is halted or paused waits for somebody who knows"
        )


def test_a_program_that_is_gone_or_does_nothing_is_told_for_as_long_as_it_is() -> None:
    """UsherConsumersMissing compares with an hour ago, and so ends by itself."""
    (group,) = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    asked = {rule["alert"]: rule["expr"] for rule in group["rules"]}
    assert asked["UsherDown"] == 'up{job="usher"} == 0' and "job_name: usher\n" in (DEPLOY / "alerts.yml").read_text()
    assert "usher_registered" in asked["UsherNotRegistered"]


@pytest.mark.parametrize("program", ["master", "consumer"])
def test_template_units_of_systemd_start_programs_that_there_are(program: str) -> None:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(DEPLOY / "systemd" / f"usher-{program}@.service")
    service = unit["Service"]
    assert (service["Type"], service["KillMode"]) == ("notify", "mixed")
    assert float(service["TimeoutStopSec"]) > ConsumerSettings.model_fields["drain_seconds"].default + 8
    _, command, *words = service["ExecStart"].split()  # usher
    flags = {flag for parameter in load_command(COMMANDS[command].target).params for flag in parameter.opts}
    assert command == program
    assert {word for word in words if word.startswith("--")} <= flags
