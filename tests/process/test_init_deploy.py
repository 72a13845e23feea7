"""`usher init-deploy`: the written folders run for real, on one host and on two, each under its own supervisord."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis
import requests

from tests.audit.test_archive import states_of
from tests.hands import USERS, CommandRefused, free_port
from tests.process.host_folder import FILES, HostFolder, handled, one_host, requests_ready, send_one
from tests.process.machine import ROOT, USHER, environ_for, kill_all_of, processes_of, until
from tests.tls_front import Papers
from usher import Link

__all__ = ["FILES"]

pytestmark = pytest.mark.process


def test_a_folder_for_everything_runs_and_drains(folder: Path) -> None:
    host = one_host(folder, USHER_OUTBOX_URL=states_of(folder / "states.db"), USHER_RECONCILE="data.n")
    modes = {
        name: stat.S_IMODE((host.folder / name).stat().st_mode)
        for name in ("usher.env", "consumer.env", "users.acl", "redis.conf", "state", "start")
    }
    secret = dict.fromkeys(("usher.env", "consumer.env", "users.acl", "redis.conf"), 0o600)
    assert modes == secret | {"state": 0o700, "start": 0o755}
    secrets = {value for name, value in host.settings.items() if name.endswith("_TOKEN") or name.startswith("TOKEN_")}
    secrets |= {
        urlsplit(url).password or ""
        for name, url in host.settings.items()
        if name.startswith(("USHER_REDIS_URL", "REDIS_URL_"))
    }
    assert len(secrets) == 4 + len(USERS)
    for file in host.folder.iterdir():
        if file.is_file() and file.stat().st_mode & 0o077:
            assert not [secret for secret in secrets if secret in file.read_text()], (
                f"{file.name} is readable for others"
            )
    host.start()
    url = host.settings["USHER_MASTER_URLS"].partition(",")[0]
    token = {"Authorization": f"Bearer {host.settings['USHER_API_TOKEN']}"}

    def consumers() -> int:
        try:
            return int(requests.get(f"{url}/api/lag", headers=token, timeout=20).json().get("consumers", 0))
        except requests.ConnectionError:
            return 0

    until(lambda: consumers() == 2, 60, "both consumers are registered")
    assert requests.get(f"{url}/api/lag", timeout=20).status_code == 401, "the token is asked for"
    roles = {name: {"Authorization": f"Bearer {host.settings[f'TOKEN_{name}']}"} for name in ("OPERATOR", "VIEWER")}
    for name, status in (("VIEWER", 403), ("OPERATOR", 404)):
        assert requests.get(f"{url}/api/lag", headers=roles[name], timeout=20).status_code == 200
        assert (
            requests.post(f"{url}/api/consumers/nobody/drain", headers=roles[name], json={}, timeout=20).status_code
            == status
        )
    check_users(host, folder)
    with redis.Redis.from_url(host.settings["REDIS_URL_PRODUCER"]) as producer:
        producer.xadd("ticket_stream", {"ticket_id": "7", "text": "hello"})
    until(lambda: handled(host) == ["7 hello"], 30, "the message is handled")
    assert "clean" in host.sh("usher audit prove --bodies"), "as the user of masters"
    cron = f"cd {host.folder} && ./as auditor usher audit --json >> audit.jsonl"  # as docs/audit.md has it
    subprocess.run(["env", "-i", "/bin/sh", "-c", cron], check=True, timeout=300)
    assert '"verdict":"clean"' in (host.folder / "audit.jsonl").read_text(), "with rights to just that"
    told = host.sh("supervisorctl -c supervisord.conf status")
    assert re.findall(r"^(audit|proof|re[cp]\w+) +RUNNING", told, re.MULTILINE) == [
        "audit",
        "proof",
        "reconcile",
        "report",
    ]
    assert "Totals as they should be" in host.sh("./as auditor usher audit reconcile")
    assert host.stop() == 0
    assert "consumer_drained" in host.logs()
    assert not processes_of(folder)


@pytest.mark.slow
def test_a_handler_in_the_folder_where_the_command_was_given_is_found_by_the_service(folder: Path) -> None:
    """And nothing else there comes before Python's own modules."""
    (folder / "queue.py").write_text("raise RuntimeError('the wrong one')")
    host = one_host(folder, PYTHONPATH="")
    assert "PYTHONPATH" not in host.settings
    conf = (host.folder / "supervisord.conf").read_text()
    assert "Totals of log consumers are NOT reconciled: set USHER_OUTBOX_URL" in conf
    assert (conf.count(f"\ndirectory = {folder}\n"), conf.count("[program:consumer-")) == (2, 2)
    assert f"cd {folder} && usher init-deploy {host.folder} --force" in conf, (
        "else it would not be found after it was written anew"
    )
    (script,) = re.findall(r"^    (cd .* && )usher preflight$", (host.folder / "README.md").read_text(), re.MULTILINE)
    assert host.sh(script + shlex.join([*USHER, "preflight"])) == ""
    host.start()
    until(lambda: requests_ready(host.settings["USHER_MASTER_URLS"].split(",")), 60, "the masters are ready")
    send_one(host.settings["USHER_REDIS_URL"], "7", "hello")
    until((folder / "handled").exists, 60, "the message is handled")
    assert host.stop() == 0


@pytest.mark.parametrize(
    ("handler", "told"),
    [
        ("nowhere:handle", "there is no module 'nowhere' in {made} or on the Python path"),
        ("broken:handle", "No module named 'not_there_at_all' ({folder}/broken.py, line 1)"),
    ],
)
def test_of_a_handler_that_the_service_could_not_use_it_warns(folder: Path, handler: str, told: str) -> None:
    """It may come later: the folder is written all the same, and the exit code says that something is wrong."""
    (folder / "broken.py").write_text("import not_there_at_all\n")
    made = folder / "made"
    done = subprocess.run(
        [*USHER, "init-deploy", str(made), "--handler", handler],
        env=environ_for(folder),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, (made / "supervisord.conf").exists()) == (1, True)
    assert told.format(folder=folder, made=made) in done.stderr
    assert "no consumer will start" in done.stderr
    assert f"init-deploy {made} --force" in done.stderr, "the command for later"


def test_systemd_finds_nothing_wrong_with_the_unit(folder: Path) -> None:
    """`systemd-analyze verify` reads the file as systemd does, and looks whether what it names is there; nothing is
    started."""
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed here (Debian: apt-get install systemd): the unit is not verified")
    host = one_host(folder)
    unit = host.folder / "usher.service"

    def verify() -> str:
        done = subprocess.run(
            [analyze, "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False, timeout=60
        )
        return "\n".join(
            line for line in (done.stdout + done.stderr).splitlines() if str(unit) in line or "usher.service" in line
        )

    assert verify() == ""
    unit.write_text(
        unit.read_text().replace("KillMode=mixed", "KillMode=mixt").replace("ExecStart=/", "ExecStart=/nowhere/")
    )
    told = verify()
    assert "kill mode" in told.lower()
    assert "/nowhere/" in told


def check_users(host: HostFolder, folder: Path) -> None:
    """Every program works as its own user of Redis, and sees no other one's password."""
    admin = Link(host.settings["REDIS_URL_ADMIN"], "test")
    users = set(re.findall(r" user=(\w+)", admin.call("CLIENT", "LIST").decode()))
    admin.close()
    assert users - {"auditor"} == {"admin", "master", "consumer"}
    with pytest.raises(CommandRefused, match="NOPERM"):
        Link(host.settings["REDIS_URL_CONSUMER"], "test").call("KEYS", "*")
    for process in processes_of(folder):
        command = " ".join(process.cmdline())
        if "consumer-name" in command:
            environ = process.environ()
            assert environ["USHER_REDIS_URL"] == host.settings["REDIS_URL_CONSUMER"]
            assert environ["USHER_API_TOKEN"] == host.settings["TOKEN_CONSUMER"]
            assert not [name for name in environ if name.startswith(("REDIS_URL_", "TOKEN_"))]
            assert not {host.settings[name] for name in ("USHER_REDIS_URL", "USHER_API_TOKEN")} & {*environ.values()}
        if "supervisor.supervisord" in command:
            assert not [name for name in process.environ() if "TOKEN" in name or "REDIS_URL" in name]


@pytest.mark.slow
def test_two_hosts_share_one_redis_and_survive_the_loss_of_one(folder: Path) -> None:
    port = free_port(23)
    masters = f"http://127.0.0.1:{port},http://127.0.0.2:{port}"
    settings = {"USHER_LEASE_SECONDS": "3", "USHER_LEADER_LEASE_SECONDS": "2", "USHER_HEALTH_HOSTS": "127.0.0.0/8"}
    settings |= {"USHER_MASTER_URLS": masters, "USHER_PORT": str(port), "USHER_REDIS_PORT": str(port + 1)}
    first = HostFolder(folder, "a", "--role", "redis", "--role", "master", **settings)
    second_words = ("--role", "master", "--role", "consumer", "--host", "127.0.0.2", "--consumers", "1")
    second = HostFolder(folder, "b", *second_words, "--handler", "shop:handle", **{**first.settings, **settings})
    assert second.settings["USHER_API_TOKEN"] == first.settings["USHER_API_TOKEN"]
    url = first.settings["USHER_REDIS_URL"]
    second.start()  # first, as it may happen: it waits
    time.sleep(1)
    first.start()
    until(lambda: requests_ready(masters.split(",")), 90, "both masters are ready")
    send_one(url, "7", "hello")
    until(lambda: handled(second) == ["7 hello"], 60, "handled on the second host")
    first.sh("supervisorctl -c supervisord.conf stop master:*")
    send_one(url, "8", "still")
    until(lambda: handled(second) == ["7 hello", "8 still"], 60, "the other master leads")
    assert "127.0.0.2-1" in second.sh("usher consumers list")
    kill_all_of(folder)
    second.process.wait(10)
    first.process.wait(10)
    until(lambda: not processes_of(folder), 20, "all are gone")


@pytest.mark.slow
def test_a_folder_with_certificates_speaks_https_everywhere(folder: Path) -> None:
    """Masters asked consumers for their health over plain HTTP: all were silent, and one that hung was not noticed."""
    papers = Papers(folder)
    tls = {"USHER_TLS_CERT": str(papers.cert), "USHER_TLS_KEY": str(papers.key), "USHER_TLS_CA": str(papers.ca)}
    words = (*USHER, "init-deploy", str(folder / "plain"))
    environ = environ_for(folder) | tls | {"USHER_MASTER_URLS": "http://127.0.0.1:8700"}
    refused = subprocess.run(words, env=environ, cwd=folder, capture_output=True, text=True, check=False, timeout=60)
    assert refused.returncode == 2 and "name them https://" in refused.stderr
    host = one_host(folder, **tls)
    host.start()
    until(lambda: host.logs().count(" consumer_registered consumer=") == 2, 60, "both consumers have come")
    [line] = re.findall(r"^for url in .*$", (ROOT / "deploy" / "runbook.md").read_text(), re.MULTILINE)
    assert host.sh(line).count('"status":"ok"') == len(host.settings["USHER_MASTER_URLS"].split(","))
    time.sleep(12)  # for more than HEALTH_FAILURES questions
    assert "silent" not in host.logs() and "revoked" not in host.logs()
    assert host.stop() == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_source_distribution_has_all_of_the_checkout(folder: Path) -> None:
    """Its tests and documents too, so that whoever packages it can test what was built."""
    names = copy_of_the_checkout(folder / "tree")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    tools = folder / "tools"
    get = (sys.executable, "-m", "pip", "install", "-q", "--target", tools, "setuptools>=77")
    subprocess.run(get, env=environ, check=True, capture_output=True)
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    environ["PYTHONPATH"] = str(tools)
    subprocess.run([sys.executable, "-c", build], env=environ, cwd=folder / "tree", check=True, capture_output=True)
    (made,) = folder.glob("*.tar.gz")
    with tarfile.open(made) as opened:
        held = {member.partition("/")[2] for member in opened.getnames()}
    assert sorted(names - held) == [".gitignore"]


def copy_of_the_checkout(tree: Path, without: str | None = None) -> set[str]:
    """Names of the files that are copied: those of the checkout, committed or to be."""
    found = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout
    names = {
        name
        for name in found.decode().split("\0")
        if name
        and ((ROOT / name).is_symlink() or (ROOT / name).is_file())
        and not (without and name.startswith(without))
    }
    for name in names:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name, follow_symlinks=False)
    return names
