"""The embedded redis-server: real servers, real kills, real leftovers."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.oldest import oldest_server
from usher.common.base.errors import StartRefused
from usher.common.redis import embedded
from usher.common.redis.client import Link
from usher.common.redis.embedded import SERVER_VARIABLE, WHEEL, EmbeddedRedis, find_redis_server, free_port, server_of
from usher.common.redis.locate import LocalInstance, announce_instance, find_local_instance, resolve_redis_url
from usher.common.runtime.settings import load
from usher.master.settings import MasterSettings

_PATIENCE_S = 15.0


def _call(url: str, *command: str | int) -> object:
    with Link(url, "test") as link:
        return link.call(*command)


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def _wait_unlocked(lock: Path) -> None:
    """Wait until the kernel has taken down a killed server that is not our child."""
    deadline = time.monotonic() + _PATIENCE_S
    with lock.open() as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                assert time.monotonic() < deadline
                time.sleep(0.01)


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    before = _children()
    yield
    assert _children() <= before


@pytest.mark.parametrize("port", [0, None], ids=["port", "socket"])
def test_data_survive_restarts_and_a_kill(tmp_path_short: Path, port: int | None) -> None:
    server = EmbeddedRedis(tmp_path_short, port)
    server.start()
    try:
        first_url = server.url
        _call(server.url, "XADD", "s", "1-1", "f", "v")
        server.stop()
        server.start()
        assert server.url == first_url, "clients find it again"
        _call(server.url, "XADD", "s", "1-2", "f", "v")
        os.kill(server.pid, signal.SIGKILL)
        server.stop()
        server.start()
        assert _call(server.url, "XLEN", "s") == 2
    finally:
        server.stop()


def test_it_is_tuned_for_our_keys_as_the_deployed_one_is(tmp_path: Path) -> None:
    deployed = (Path(__file__).parents[2] / "deploy" / "redis.conf").read_text("utf-8").splitlines()
    with EmbeddedRedis(tmp_path) as server:
        for line in embedded.TUNING:
            name, value = line.split()
            assert _call(server.url, "CONFIG", "GET", name) == [name.encode(), value.encode()]
            assert line in deployed


def test_it_listens_on_loopback_only_and_wants_the_password(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server:
        listening = [
            one.laddr.ip
            for one in psutil.Process(server.pid).net_connections("inet")
            if one.status == psutil.CONN_LISTEN
        ]
        assert listening == ["127.0.0.1"]
        port = server.url.rpartition(":")[2].removesuffix("/0")
        with socket.create_connection(("127.0.0.1", int(port))) as stranger:
            stranger.sendall(b"PING\r\n")
            assert stranger.recv(100).startswith(b"-NOAUTH")


def test_on_a_socket_it_has_no_port(tmp_path_short: Path) -> None:
    with EmbeddedRedis(tmp_path_short, None) as server:
        assert psutil.Process(server.pid).net_connections("inet") == []
        assert stat.S_IMODE((server.folder / "redis.sock").stat().st_mode) == 0o700


def test_nobody_else_can_read_the_password(tmp_path: Path) -> None:
    (tmp_path / "redis").mkdir(mode=0o755)
    with EmbeddedRedis(tmp_path) as server:
        password = (server.folder / "password").read_text().strip()
        assert len(password) >= 40
        assert password not in " ".join(psutil.Process(server.pid).cmdline())
        assert stat.S_IMODE(server.folder.stat().st_mode) == 0o700
        for name in ("password", "redis.conf", "redis.log", "lock"):
            assert stat.S_IMODE((server.folder / name).stat().st_mode) == 0o600, name
        assert password not in (server.folder / "redis.log").read_text()


@pytest.mark.parametrize("password", ["p@ss/w:rd", 'two words "quoted" \\', "#päss%20"])
def test_a_password_that_somebody_chose_is_used(tmp_path_short: Path, password: str) -> None:
    folder = tmp_path_short / "redis"
    folder.mkdir()
    (folder / "password").write_text(password + "\n", "utf-8")
    for port in (0, None):
        with EmbeddedRedis(tmp_path_short, port) as server:
            assert _call(server.url, "CONFIG", "GET", "requirepass") == [b"requirepass", password.encode()]


def test_a_second_start_on_the_folder_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as first:
        with pytest.raises(
            StartRefused, match=rf"USHER_STATE_DIR: an embedded Redis already runs on .* \(process {first.pid}\)"
        ):
            EmbeddedRedis(tmp_path).start()
        assert _call(first.url, "PING") == b"PONG"
        with pytest.raises(RuntimeError):
            first.start()


def test_the_lock_is_the_servers_own_so_it_outlives_a_killed_starter(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from usher.common.redis.embedded import EmbeddedRedis\n"
        "server = EmbeddedRedis(Path(sys.argv[1])); server.start(); print(server.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE) as starter:
        try:
            assert starter.stdout is not None
            orphan = int(starter.stdout.readline())
        finally:
            starter.kill()
    try:
        with pytest.raises(StartRefused, match=f"process {orphan}"):
            EmbeddedRedis(tmp_path).start()
    finally:
        os.kill(orphan, signal.SIGKILL)
    _wait_unlocked(tmp_path / "redis" / "lock")
    with EmbeddedRedis(tmp_path) as server:
        assert _call(server.url, "PING") == b"PONG"


def test_leftovers_of_a_crash_do_no_harm(tmp_path_short: Path) -> None:
    with EmbeddedRedis(tmp_path_short, None) as server:
        _call(server.url, "XADD", "s", "1-1", "f", "v")
        folder = server.folder
    (folder / "redis.conf").write_text("half a fi")
    (folder / "redis.conf.new").write_text("half a file")
    (folder / "temp-rewriteaof-1.aof").write_bytes(b"half")
    (folder / "lock").write_text("999999999\n")
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(folder / "redis.sock"))
    with (folder / "appendonly.aof").open("ab") as data:
        data.write(b"*3\r\n$3\r\nSET\r\n$1\r\nk")  # the power failed here
    with EmbeddedRedis(tmp_path_short, None) as server:
        assert _call(server.url, "XLEN", "s") == 1
        assert _call(server.url, "EXISTS", "k") == 0


@pytest.mark.parametrize(
    "name", ["with space", 'quo"te', "back\\slash", "üñï", "# hash", "a'b", "tab\there", "per%cent", "q?x"]
)
def test_any_folder_name_will_do(tmp_path_short: Path, name: str) -> None:
    for port in (0, None):
        with EmbeddedRedis(tmp_path_short / name, port) as server:
            assert _call(server.url, "CONFIG", "GET", "dir") == [b"dir", os.fsencode(tmp_path_short / name / "redis")]


def test_a_taken_port_is_refused_in_the_words_of_redis(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = EmbeddedRedis(tmp_path, port)
        with pytest.raises(StartRefused, match="Address already in use"):
            server.start()
    server.start()
    server.stop()
    server.stop()


def test_data_that_cannot_be_read_are_told_and_kept(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server:
        _call(server.url, "SET", "a", "b")
    [written] = (tmp_path / "redis").rglob("*.aof")
    written.write_bytes(b"this is no append-only file\n" * 10)
    with pytest.raises(StartRefused, match="the embedded Redis in .* ended at its start: .*Bad file format"):
        EmbeddedRedis(tmp_path).start()
    assert written.stat().st_size == 280


def test_what_the_oldest_server_wrote_is_there_on_the_next_one(tmp_path: Path) -> None:
    older, newer = oldest_server(), server_of()
    if older is None or newer is None:
        pytest.skip("a wheel is not there")
    with EmbeddedRedis(tmp_path, server=str(older)) as server:
        link = Link(server.url, "test")
        stream_id = link.call("XADD", "s", "*", "ticket_id", "42")
        link.call("XGROUP", "CREATE", "s", "g", "0")
        link.call("XREADGROUP", "GROUP", "g", "c", "STREAMS", "s", ">")
        link.call("HSET", "h", "n", "1")
        link.close()
    for _ in range(2):
        with EmbeddedRedis(tmp_path, server=str(newer)) as server:
            link = Link(server.url, "test")
            assert link.call("XPENDING", "s", "g") == [1, stream_id, stream_id, [[b"c", b"1"]]]
            assert link.call("HINCRBY", "h", "n", 1) > 1
            link.close()
    with pytest.raises(StartRefused, match="cannot read them"):
        EmbeddedRedis(tmp_path, server=str(older)).start()


def test_a_server_that_does_not_answer_in_time_is_taken_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mute = tmp_path / "redis-server"
    mute.write_text("#!/bin/sh\nexec sleep 60\n")
    mute.chmod(0o700)
    monkeypatch.setattr(embedded, "find_redis_server", lambda wanted: mute)
    with pytest.raises(StartRefused, match="does not answer in time"):
        EmbeddedRedis(tmp_path).start(ready_within_s=0.3)


def test_a_stopped_process_is_killed_after_the_grace(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path)
    server.start()
    pid = server.pid
    os.kill(pid, signal.SIGSTOP)
    server.stop(grace_s=0.2)
    assert not psutil.pid_exists(pid)


def test_a_control_c_at_the_terminal_does_not_reach_it(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server:
        assert os.getsid(server.pid) != os.getsid(0)
        assert os.getpgid(server.pid) != os.getpgid(0)


@contextlib.contextmanager
def _foreground(state: Path, port: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "usher.common.redis.embedded", "--state", str(state), "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_the_command_becomes_the_server_and_ends_with_it(tmp_path: Path) -> None:
    port = free_port()
    with _foreground(tmp_path, port) as server:
        assert server.stdout is not None
        for line in server.stdout:
            if "Ready to accept connections" in line:
                break
        assert Path(psutil.Process(server.pid).exe()) == find_redis_server().resolve()
        password = (tmp_path / "redis" / "password").read_text().strip()
        assert _call(f"redis://:{password}@127.0.0.1:{port}", "PING") == b"PONG"
        with _foreground(tmp_path, free_port()) as second:
            _, told = second.communicate(timeout=_PATIENCE_S)
            assert second.returncode == 2
            assert told.count("\n") == 1
            assert f"process {server.pid}" in told
        server.terminate()
        assert server.wait(_PATIENCE_S) == 0


def test_the_binary_of_a_wheel_is_preferred_without_importing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SERVER_VARIABLE)
    program = (
        "import sys; from usher.common.redis.embedded import find_redis_server; print(find_redis_server()); assert %r"
        " not in sys.modules"
    )
    told = subprocess.run([sys.executable, "-c", program % WHEEL], capture_output=True, text=True, check=True).stdout
    assert Path(told.strip()) == server_of()


def test_without_a_wheel_the_path_is_searched_and_then_the_setting_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SERVER_VARIABLE)
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StartRefused, match="USHER_REDIS_URL"):
        find_redis_server()
    binary = tmp_path / "redis-server"
    binary.touch(mode=0o700)
    assert find_redis_server() == binary


def _settings(state: Path, redis_url: str = "") -> MasterSettings:
    return load(MasterSettings, {"USHER_STATE_DIR": str(state), "USHER_REDIS_URL": redis_url})


def test_else_the_redis_of_the_running_up(tmp_path: Path) -> None:
    up = LocalInstance("redis://:secret@up", "http://a,http://b", os.getpid(), "consumer-1,consumer-2")
    announce_instance(tmp_path / "new", up)
    assert find_local_instance(tmp_path / "new") == up
    assert resolve_redis_url(_settings(tmp_path / "new")) == up.redis_url
    assert stat.S_IMODE((tmp_path / "new" / "up.json").stat().st_mode) == 0o600
    told = {
        "redis_url": up.redis_url,
        "master_urls": up.master_urls,
        "pid": up.pid,
        "consumers": up.consumers,
        "starting_since_ms": 0,
    }
    assert json.loads((tmp_path / "new" / "up.json").read_text()) == told


def _gone_pid() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    return gone.pid


@pytest.mark.parametrize(
    "text", [None, "", "{}", "[]", "null", '{"redis_url": "redis://x", "master_urls": "", "pid": "x"}', "\xff"]
)
def test_without_either_the_line_names_the_setting_and_where_it_looked(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "up.json").write_text(text, "latin-1")
    with pytest.raises(StartRefused) as refused:
        resolve_redis_url(_settings(tmp_path))
    assert (
        str(refused.value)
        == f"USHER_REDIS_URL is empty, and no `usher run` or `usher up` runs here (looked in {tmp_path / 'up.json'})"
    )


@pytest.mark.parametrize("pid", [0, -1, None, 2**40], ids=["zero", "negative", "gone", "impossible"])
def test_an_up_whose_process_is_gone_does_not_run(tmp_path: Path, pid: int | None) -> None:
    announce_instance(tmp_path, LocalInstance("redis://up", "http://m", _gone_pid() if pid is None else pid))
    assert find_local_instance(tmp_path) is None
