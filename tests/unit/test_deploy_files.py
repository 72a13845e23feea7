"""What `usher init-deploy` refuses and writes, and whether the files of deploy/ fit each other. Nothing is started."""

from __future__ import annotations

import configparser
import os
import pwd
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from usher.cli import COMMANDS, load_command
from usher.common.base.errors import SettingsError, StartRefused, UsherError
from usher.common.http.credentials import Role, line_of
from usher.common.redis.acl import USERS, acl_file
from usher.consumer.settings import ConsumerSettings
from usher.deploy.local.init_deploy import DEPLOY, Host, write
from usher.deploy.local.up import AROUND_DRAIN_S, LocalSettings

_ELSEWHERE = {"USHER_REDIS_URL": "redis://:pw@10.0.0.9:6379/0", "USHER_API_TOKEN": "token"}
_MASTERS = {"USHER_MASTER_URLS": "http://10.0.0.1:8700"}


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="usher-t-", dir="/tmp") as name:  # short enough
        yield Path(name)


def planned(
    *roles: str, folder: str | Path = "/srv/usher", host: str = "127.0.0.1", environ: dict[str, str] | None = None
) -> Host:
    return Host(Path(folder), roles or ("all",), host, 2, "shop:handle", environ or {})


def sections(host: Host) -> dict[str, dict[str, str]]:
    parser = configparser.RawConfigParser(inline_comment_prefixes=(" ;",))
    parser.read_string(host.files()["supervisord.conf"])
    return {name: dict(parser[name]) for name in parser.sections()}


def test_what_is_generated_is_new_each_time_and_what_is_given_is_kept() -> None:
    one, other = planned(), planned()
    for name in ("USHER_API_TOKEN", "USHER_REDIS_URL"):
        assert one.settings[name] != other.settings[name]
    again = planned(environ=dict(one.settings))
    assert (again.settings, again.roles, again.files()) == (one.settings, one.roles, one.files())
    assert set(planned(environ=_ELSEWHERE).files()) == set(one.files()) - {"redis.conf", "users.acl"}


def test_settings_of_the_environment_are_kept_but_for_those_of_one_program() -> None:
    environ = {"USHER_LEASE_SECONDS": "7", "USHER_BIND": "127.0.0.1:1", "USHER_STATE_DIR": "/elsewhere", "HOME": "/"}
    settings = planned(environ=environ).settings
    assert (settings["USHER_LEASE_SECONDS"], settings["USHER_STATE_DIR"]) == ("7", "/srv/usher/state")
    assert not {"USHER_BIND", "HOME"} & settings.keys()


def test_a_redis_of_our_own_has_a_user_for_each_kind_of_program(folder: Path) -> None:
    host = planned()
    files = host.files()
    write(planned(folder=folder), files)
    acl = files["users.acl"]
    assert set(re.findall(r"^user (\w+) on resetpass #[0-9a-f]{64} ", acl, re.MULTILINE)) == set(USERS)
    assert "requirepass" not in files["redis.conf"].partition("# ---- this host")[2]
    passwords = {urlsplit(url).password or "" for name, url in host.settings.items() if "REDIS_URL" in name}
    assert len(passwords) == len(USERS)
    for name, text in files.items():
        if (folder / name).stat().st_mode & 0o077 or name == "users.acl":
            assert not [secret for secret in passwords if secret in text], name


def secrets_of(env: str) -> dict[str, str]:
    found = dict(re.findall(r"^(\w+)='(.*)'$", env, re.MULTILINE))
    return {name: value for name, value in found.items() if "TOKEN" in name or "REDIS" in name}


def test_programs_of_a_role_are_told_their_own_secrets_and_no_other() -> None:
    """Consumers, and so their handlers, saw the token of programs and, in usher.env, all others."""
    first = planned(environ={"USHER_HEALTH_HOSTS": "10.0.0.0/24"})
    files, settings = first.files(), first.settings
    assert sections(first)["program:consumer-1"]["command"].startswith("%(here)s/as consumer ")
    of_consumers = {
        "USHER_API_TOKEN": settings["TOKEN_CONSUMER"],
        "USHER_REDIS_URL": settings["REDIS_URL_CONSUMER"],
        "USHER_REDIS_SERVER": settings["USHER_REDIS_SERVER"],
    }
    assert secrets_of(files["consumer.env"]) == of_consumers
    assert not [name for name in secrets_of(files["master.env"]) if name.startswith("REDIS_URL_")]
    assert not re.search(r"EnvironmentFile|usher\.env", files["usher.service"] + files["start"]), "nor has supervisord"
    for known in (settings, dict(re.findall(r"^(\w+)='(.*)'$", files["consumer.env"], re.MULTILINE))):
        other = planned("consumer", environ={**known, **_MASTERS}, host="10.0.0.3")
        for name in ("usher.env", "consumer.env"):
            assert secrets_of(other.files()[name]) == of_consumers, "on a host of their own too"


def test_a_unit_leaves_its_programs_few_rights(folder: Path) -> None:
    if (analyze := shutil.which("systemd-analyze")) is None:
        pytest.skip("systemd-analyze is not installed here (Debian: apt-get install systemd)")
    (unit := folder / "usher.service").write_text(planned().files()["usher.service"])
    words = [analyze, "security", "--offline=true", "--no-pager", str(unit)]
    told = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60).stdout
    if (found := re.search(r"exposure level for usher.service: ([0-9.]+)", told)) is None:
        pytest.skip("this systemd-analyze does not rate files")
    assert float(found[1]) <= 3, "9.1 of 10 before"


def test_each_role_has_a_user_of_its_own_where_root_finds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    known = {"usher-redis", "usher-master", "usher-consumer"}
    monkeypatch.setattr(pwd, "getpwnam", lambda name: {one: one for one in known}[name])
    users = [found.get("user") for name, found in sections(planned()).items() if name.startswith("program:")]
    assert users == ["usher-redis", *["usher-master"] * 2, *["usher-consumer"] * 2, *["usher-master"] * 3], "of audits"
    known.remove("usher-master")
    assert not planned().users
    assert planned("consumer", environ={**_ELSEWHERE, **_MASTERS}).users == {"consumer": "usher-consumer"}


def test_redis_speaks_tls_where_programs_do_and_others_can_reach_it() -> None:
    """Its passwords went through the network as plain text beside HTTPS."""
    tls = {"USHER_TLS_CERT": "/etc/c.pem", "USHER_TLS_KEY": "/etc/k.pem", "USHER_TLS_CA": "/etc/ca.pem"}
    host = planned(environ=tls, host="10.0.0.1")
    urls = [url for name, url in host.settings.items() if "REDIS_URL" in name]
    assert {url.partition("@")[2] for url in urls} == {"10.0.0.1:6390/0?ssl_ca_certs=/etc/ca.pem"}
    assert {urlsplit(url).scheme for url in urls} == {"rediss"}
    assert "port 0\ntls-port 6390\n" in host.files()["redis.conf"]
    assert planned(environ=tls).settings["USHER_REDIS_URL"].startswith("redis://"), "on loopback nobody listens"
    plain = planned(host="10.0.0.1").settings
    later = planned(environ={**plain, **tls, "USHER_MASTER_URLS": ""}, host="10.0.0.1").settings
    assert urlsplit(later["USHER_REDIS_URL"]).scheme == "rediss"
    passwords = {urlsplit(of["USHER_REDIS_URL"]).password for of in (plain, later)}
    assert len(passwords) == 1, "certificates may come later"


@pytest.mark.parametrize("name", ["a b", "x ~* +@all ~y", "a\nuser x on nopass ~* +@all", 'a"b', "it's"])
def test_a_stream_whose_name_cannot_stand_in_a_users_file_is_refused(name: str) -> None:
    for stream, sources in ((name, ()), ("work", (name,))):
        with pytest.raises(StartRefused, match="cannot stand in an ACL file"):
            acl_file(stream, "g", sources)


def test_tokens_are_made_for_programs_operators_viewers_and_consumers(folder: Path) -> None:
    (folder / "tokens").write_text("operator operator " + "0" * 64 + "\nviewer ann " + "1" * 64 + "\n")
    host = planned(folder=folder)
    tokens = [host.settings[name] for name in ("USHER_API_TOKEN", "TOKEN_OPERATOR", "TOKEN_VIEWER", "TOKEN_CONSUMER")]
    assert len({*tokens}) == 4 and min(map(len, tokens)) > 40
    names = ((Role.OPERATOR, "operator"), (Role.VIEWER, "viewer"), (Role.CONSUMER, "*"))
    *made, kept = host.files()["tokens"].splitlines()
    assert made == [line_of(*one, token) for one, token in zip(names, tokens[1:], strict=True)]
    assert kept == "viewer ann " + "1" * 64, "what people have added"
    assert "tokens" not in planned(environ={"USHER_TOKENS_FILE": "/etc/tokens"}).files(), "there is one already"


def test_addresses_of_ipv6_have_brackets_where_they_must() -> None:
    host = planned(host="fd00::1")
    assert host.settings["USHER_REDIS_URL"].endswith("@[fd00::1]:6390/0")
    assert host.settings["USHER_MASTER_URLS"].startswith("http://[fd00::1]:8700,")
    assert "bind fd00::1\n" in host.files()["redis.conf"]
    assert "--bind '[fd00::1]:8700'" in sections(host)["program:master-1"]["command"]


@pytest.mark.parametrize(
    ("roles", "environ", "place", "told"),
    [
        (("master",), {}, {}, "USHER_REDIS_URL"),
        (("consumer",), {"USHER_REDIS_URL": "redis://10.0.0.9"} | _MASTERS, {}, "USHER_API_TOKEN"),
        (("consumer",), _ELSEWHERE, {}, "USHER_MASTER_URLS"),
        (("redis",), _ELSEWHERE, {}, "USHER_REDIS_URL"),
        (("master",), _ELSEWHERE, {"host": "10.0.0.1"}, "USHER_HEALTH_HOSTS"),
        *((("all",), {}, {"host": host}, "--host") for host in ("0.0.0.0", "a b", "-h", "a.example:80")),
        (("all",), _MASTERS, {}, "--host 127.0.0.1"),
        (("all",), {}, {"folder": "/srv/" + "x" * 70}, "path"),
        (("all",), {}, {"folder": "/srv/a b"}, "path"),
        (("all",), _ELSEWHERE | {"REDIS_URL_SENDER": "redis://sender:a'b@10.0.0.9:6379/0"}, {}, "REDIS_URL_SENDER"),
        (("all",), {"USHER_TICKET_FIELD": "a\nb"}, {}, "USHER_TICKET_FIELD"),
        (("all",), {"USHER_LEASE_SECONDS": "soon"}, {}, "USHER_LEASE_SECONDS"),
        (("all",), {"USHER_LEADER_LEASE_SECONDS": "soon"}, {}, "USHER_LEADER_LEASE_SECONDS"),
    ],
)
def test_what_cannot_work_is_refused_and_named(
    roles: tuple[str, ...], environ: dict[str, str], place: dict[str, str], told: str
) -> None:
    with pytest.raises(UsherError, match=re.escape(told)) as refused:
        planned(*roles, environ=environ, **place)  # type: ignore[arg-type]
    assert isinstance(refused.value, (StartRefused, SettingsError))


def test_a_program_is_not_killed_while_it_may_still_drain() -> None:
    """supervisord must wait for longer than the program: drain, 5 s around it (consumer/__main__), and 3 s until its
    arbiter kills."""
    for drain_s in (0.0, 20.0, 100.5):
        host = planned(environ={"USHER_DRAIN_SECONDS": str(drain_s)})
        assert host.stop_seconds == LocalSettings(drain_seconds=drain_s).stop_seconds > drain_s + 5 + 3
        whole = int(re.findall(r"TimeoutStopSec=(\d+)", host.files()["usher.service"])[0])
        waits = {name: int(one["stopwaitsecs"]) for name, one in sections(host).items() if "stopwaitsecs" in one}
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
    flags = {flag for parameter in load_command(COMMANDS[command][0]).params for flag in parameter.opts}
    assert command == program
    assert {word for word in words if word.startswith("--")} <= flags
