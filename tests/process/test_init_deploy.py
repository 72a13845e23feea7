"""`usher init-deploy`: the written folders run for real, on one host and on two, each under its own supervisord; and the runbook is tried."""

from __future__ import annotations

import os
import random
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis
import requests

from common.acl import USERS
from common.commands.local import quiet_port
from common.embedded import find_redis_server
from common.redis_client import CommandRefused, Link
from tests.process.machine import ROOT, USHER, environ_for, kill_all_of, processes_of, until

pytestmark = pytest.mark.process

FILES = {"shop.py": """
import pathlib
from consumer import GiveUp, RetryLater
def handle(message):
    if message.fields["text"] == "bad" and not pathlib.Path("mended").exists():
        raise GiveUp("not mended")
    if message.ticket_id == "42" and pathlib.Path("stuck").exists():
        raise RetryLater(after_s=0.5)
    with open("handled", "a") as out:
        out.write(message.ticket_id + " " + message.fields["text"] + chr(10))
"""}


class HostFolder:
    """A folder that `usher init-deploy` wrote, and the supervisord that runs it."""

    def __init__(self, home: Path, name: str, *words: str, **environ: str) -> None:
        self.folder = home / name
        path = f"{find_redis_server().parent}:{environ_for(home)['PATH']}"
        self.environ = environ_for(home) | {"PATH": path, "PYTHONPATH": f"{home}:{ROOT}"} | environ
        done = subprocess.run(
            [*USHER, "init-deploy", str(self.folder), *words], env=self.environ, cwd=home, capture_output=True, text=True, check=False, timeout=60
        )
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        lines = (self.folder / "usher.env").read_text().splitlines()
        self.settings = dict(re.findall(r"(\w+)='(.*)'", "\n".join(lines)))

    def start(self) -> None:
        with (self.folder / "out").open("wb") as out:
            self.process = subprocess.Popen([self.folder / "start"], env=self.environ, cwd="/", stdout=out, stderr=out, stdin=subprocess.DEVNULL)

    def sh(self, script: str) -> str:
        """What a person does in the folder; it must go well."""
        prelude = "set -euo pipefail; set -a; . ./usher.env; set +a\n"
        done = subprocess.run(
            ["bash", "-c", prelude + script], env=self.environ, cwd=self.folder, capture_output=True, text=True, check=False, timeout=180
        )
        assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}\n{self.logs()}"
        return done.stdout

    def logs(self) -> str:
        return "\n".join(f"== {file.name}\n{file.read_text(errors='replace')[-3000:]}" for file in sorted((self.folder / "state" / "logs").iterdir()))

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(90)


def _handled(host: HostFolder) -> list[str]:
    path = host.folder / "handled"
    return path.read_text().splitlines() if path.exists() else []


def _send(url: str, ticket: str, text: str) -> None:
    link = Link(url, "test")
    link.call("XADD", "ticket_stream", "*", "ticket_id", ticket, "text", text)
    link.close()


def _ports(count: int) -> int:
    return quiet_port(count, random.Random())


def one_host(home: Path, **environ: str) -> HostFolder:
    port = _ports(5)
    masters = f"http://127.0.0.1:{port},http://127.0.0.1:{port + 1}"
    words = ("--masters", masters, "--redis-port", str(port + 2), "--health-port", str(_ports(4)), "--handler", "shop:handle")
    return HostFolder(home, "one", *words, **{"USHER_LEASE_SECONDS": "3", **environ})


def test_a_folder_for_everything_runs_and_drains(folder: Path) -> None:
    host = one_host(folder)
    modes = {name: stat.S_IMODE((host.folder / name).stat().st_mode) for name in ("usher.env", "users.acl", "redis.conf", "state", "start")}
    assert modes == {"usher.env": 0o600, "users.acl": 0o600, "redis.conf": 0o600, "state": 0o700, "start": 0o755}
    secrets = {value for name, value in host.settings.items() if name.endswith("_TOKEN")}
    secrets |= {urlsplit(url).password or "" for name, url in host.settings.items() if name.startswith(("USHER_REDIS_URL", "REDIS_URL_"))}
    assert len(secrets) == 3 + len(USERS)
    for file in host.folder.iterdir():
        if file.is_file() and file.stat().st_mode & 0o077:
            assert not [secret for secret in secrets if secret in file.read_text()], f"{file.name} is readable for others"
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
    roles = {name: {"Authorization": f"Bearer {host.settings[f'USHER_{name}_TOKEN']}"} for name in ("OPERATOR", "VIEWER")}
    for name, status in (("VIEWER", 403), ("OPERATOR", 404)):
        assert requests.get(f"{url}/api/lag", headers=roles[name], timeout=20).status_code == 200
        assert requests.post(f"{url}/api/consumers/nobody/drain", headers=roles[name], json={}, timeout=20).status_code == status
    check_users(host, folder)
    with redis.Redis.from_url(host.settings["REDIS_URL_PRODUCER"]) as producer:
        producer.xadd("ticket_stream", {"ticket_id": "7", "text": "hello"})
    until(lambda: _handled(host) == ["7 hello"], 30, "the message is handled")
    assert host.stop() == 0
    assert "drained" in host.logs()
    assert not processes_of(folder)


def test_a_handler_in_the_folder_where_the_command_was_given_is_found_by_the_service(folder: Path) -> None:
    """And nothing else there comes before Python's own modules."""
    (folder / "queue.py").write_text("raise RuntimeError('the wrong one')")
    host = one_host(folder, PYTHONPATH="")
    assert "PYTHONPATH" not in host.settings
    conf = (host.folder / "supervisord.conf").read_text()
    assert (conf.count(f"\ndirectory = {folder}\n"), conf.count("[program:consumer-")) == (2, 2)
    assert f"cd {folder} && usher init-deploy {host.folder} --force" in conf, "else it would not be found after it was written anew"
    (script,) = re.findall(r"^    (cd .* && )usher preflight$", (host.folder / "README.md").read_text(), re.MULTILINE)
    assert host.sh(script + shlex.join([*USHER, "preflight"])) == ""
    host.start()
    until(lambda: requests_ready(host.settings["USHER_MASTER_URLS"].split(",")), 60, "the masters are ready")
    _send(host.settings["USHER_REDIS_URL"], "7", "hello")
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
        [*USHER, "init-deploy", str(made), "--handler", handler], env=environ_for(folder), cwd=folder, capture_output=True, text=True, check=False
    )
    assert (done.returncode, (made / "supervisord.conf").exists()) == (1, True)
    assert told.format(folder=folder, made=made) in done.stderr
    assert "no consumer will start" in done.stderr
    assert f"init-deploy {made} --force" in done.stderr, "the command for later"


def test_systemd_finds_nothing_wrong_with_the_unit(folder: Path) -> None:
    """`systemd-analyze verify` reads the file as systemd does, and looks whether what it names is there; nothing is started."""
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed here (Debian: apt-get install systemd): the unit is not verified")
    host = one_host(folder)
    unit = host.folder / "usher.service"

    def verify() -> str:
        done = subprocess.run([analyze, "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False, timeout=60)
        return "\n".join(line for line in (done.stdout + done.stderr).splitlines() if str(unit) in line or "usher.service" in line)

    assert verify() == ""
    unit.write_text(unit.read_text().replace("KillMode=mixed", "KillMode=mixt").replace("ExecStart=/", "ExecStart=/nowhere/"))
    told = verify()
    assert "kill mode" in told.lower()
    assert "/nowhere/" in told


def check_users(host: HostFolder, folder: Path) -> None:
    """Every program works as its own user of Redis, and sees no other one's password."""
    admin = Link(host.settings["REDIS_URL_ADMIN"], "test")
    users = set(re.findall(r" user=(\w+)", admin.call("CLIENT", "LIST").decode()))
    admin.close()
    assert users == {"admin", "master", "consumer"}
    with pytest.raises(CommandRefused, match="NOPERM"):
        Link(host.settings["REDIS_URL_CONSUMER"], "test").call("KEYS", "*")
    for process in processes_of(folder):
        command = " ".join(process.cmdline())
        if "consumer-name" in command:
            environ = process.environ()
            assert environ["USHER_REDIS_URL"] == host.settings["REDIS_URL_CONSUMER"]
            assert not [name for name in environ if name.startswith("REDIS_URL_") or name == "USHER_OPERATOR_TOKEN"]
            assert host.settings["USHER_REDIS_URL"] not in environ.values()


def test_two_hosts_share_one_redis_and_survive_the_loss_of_one(folder: Path) -> None:
    ports = _ports(2), _ports(2), _ports(1)
    masters = f"http://127.0.0.1:{ports[0]},http://127.0.0.2:{ports[1]}"
    settings = {"USHER_LEASE_SECONDS": "3", "USHER_LEADER_LEASE_SECONDS": "2", "USHER_HEALTH_HOSTS": "127.0.0.0/8"}
    with_redis = ("--role", "redis", "--role", "master", "--redis-port", str(ports[0] + 1))
    first = HostFolder(folder, "a", *with_redis, "--masters", masters, **settings)
    second_words = ("--role", "master", "--role", "consumer", "--host", "127.0.0.2", "--health-port", str(ports[2]), "--consumers", "1")
    second = HostFolder(folder, "b", *second_words, "--handler", "shop:handle", **{**first.settings, **settings})
    assert second.settings["USHER_API_TOKEN"] == first.settings["USHER_API_TOKEN"]
    url = first.settings["USHER_REDIS_URL"]
    second.start()  # first, as it may happen: it waits
    time.sleep(1)
    first.start()
    until(lambda: requests_ready(masters.split(",")), 90, "both masters are ready")
    _send(url, "7", "hello")
    until(lambda: _handled(second) == ["7 hello"], 60, "handled on the second host")
    first.sh("supervisorctl -c supervisord.conf stop master:*")
    _send(url, "8", "still")
    until(lambda: _handled(second) == ["7 hello", "8 still"], 60, "the other master leads")
    assert "127.0.0.2-1" in second.sh("usher consumers list")
    kill_all_of(folder)
    second.process.wait(10)
    first.process.wait(10)
    until(lambda: not processes_of(folder), 20, "all are gone")


def requests_ready(urls: list[str]) -> bool:
    """Whether all of them are ready."""
    try:
        return all(requests.get(f"{url}/api/health/ready", timeout=20).status_code == 200 for url in urls)
    except requests.ConnectionError:
        return False


def blocks(text: str) -> list[tuple[str, str]]:
    """(section, script) of every block of the runbook that is marked to be run."""
    found, section, script = [], "", None
    for line in text.splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        if script is None and line == "```sh run":
            script = ""
        elif script is not None and line == "```":
            found.append((section, script))
            script = None
        elif script is not None:
            script += line + "\n"
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_command_of_the_runbook(folder: Path) -> None:
    """Block after block, each on a system in the state that it is about; and at the end all messages are handled."""
    host = one_host(folder)
    url = host.settings["USHER_REDIS_URL"]
    cli = 'redis-cli --no-auth-warning -u "$REDIS_URL_ADMIN"'

    def stick() -> None:
        (host.folder / "stuck").touch()
        _send(url, "42", "at last")
        until(lambda: "handler_failed" in host.logs(), 30, "the ticket is stuck")

    def unstick() -> None:
        (host.folder / "stuck").unlink()
        until(lambda: "42 at last" in _handled(host), 30, "the ticket goes on")

    def bury() -> None:
        (host.folder / "mended").unlink(missing_ok=True)
        _send(url, "13", "bad")
        until(lambda: "message_given_up" in host.logs(), 30, "a dead letter")

    def start() -> None:
        host.start()
        until(lambda: requests_ready(host.settings["USHER_MASTER_URLS"].split(",")), 60, "the masters are ready")

    def kill_supervisord() -> None:
        host.process.kill()
        host.process.wait()
        assert processes_of(folder), "what it ran goes on"

    def start_again() -> None:
        assert not processes_of(folder), "nothing is left"
        start()

    before: dict[str, Callable[[], object]] = {
        "Killed supervisord": kill_supervisord,
        "Stuck ticket": stick,
        "Lag grows": unstick,
        "Lost group": lambda: (_send(url, "9", "x"), host.sh(f"{cli} XGROUP DESTROY ticket_stream concurrency_stream_group")),
        "Full disk or memory": lambda: host.sh(f"{cli} CONFIG SET maxmemory 1mb"),
        "Dead letters": bury,
        "Restore from a backup": lambda: _send(url, "99", "after the backup"),
    }
    after: dict[str, Callable[[], object]] = {"Killed supervisord": start_again}
    start()
    told = {}
    for section, script in blocks((host.folder / "runbook.md").read_text()):
        before.pop(section, lambda: None)()
        if "redrive" in script:
            (host.folder / "mended").touch()
        told[section, script] = host.sh(script)
        after.get(section, lambda: None)()
    assert not before, "every section that needs a state is there"
    assert len(told) > 15
    until(lambda: "13 bad" in _handled(host), 30, "the dead letter was redriven and handled")
    _send(url, "7", "in the end")
    until(lambda: "7 in the end" in _handled(host), 60, "messages flow")
    for (section, script), said in told.items():
        sys.stdout.write(f"## {section}\n{script}---\n{said}\n")
    assert host.stop() == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_installed_wheel_writes_the_folder_too(folder: Path) -> None:
    """As `pip install` gives it, without the checkout: the files of deploy/ are in the wheel."""
    tree = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, tree.decode().split("\0")):
        if (ROOT / name).is_file() and not name.startswith("tests/"):
            (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "tree" / name)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("USHER_", "PYTHON"))}

    def run(*words: str | Path) -> None:
        done = subprocess.run(words, env=environ, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", folder / "wheels", folder / "tree")
    shutil.rmtree(folder / "tree")
    (wheel,) = (folder / "wheels").iterdir()
    run(sys.executable, "-m", "pip", "install", "--no-deps", "--target", folder / "site", wheel)
    environ["PYTHONPATH"] = str(folder / "site")
    run(sys.executable, folder / "site" / "common" / "launch.py", "init-deploy", folder / "made")
    assert {file.name for file in (folder / "made").iterdir()} >= {"supervisord.conf", "usher.env", "redis.conf", "runbook.md", "alerts.yml", "start"}
    assert str(folder / "site") in (folder / "made" / "supervisord.conf").read_text()
