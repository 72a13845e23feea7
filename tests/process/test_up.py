"""`usher up`: real supervisord, real Redis, real masters and consumers, real signals."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from tests.commands import usher
from tests.process.machine import (
    REDIS,
    UP,
    USHER,
    UsherUp,
    environ_for,
    kill_all_of,
    processes_of,
    redis_cli,
    until,
    words_of,
)
from usher.common.base.errors import StartRefused
from usher.common.cli.masters import is_well, living_consumers, somebody_leads
from usher.common.redis.client import Link
from usher.common.redis.embedded import EmbeddedRedis, find_redis_server, free_port
from usher.deploy.local.up import CONFIGURATION, LocalSettings, Supervision, can_prove, environment

pytestmark = pytest.mark.process


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make this process one of the user's, in ``folder``: what is refused needs no program of its own."""

    def settle(**environ: str) -> None:
        monkeypatch.chdir(folder)
        port = str(free_port(2))
        ours = {"USHER_STATE_DIR": str(folder / "state"), "USHER_PORT": port, **environ}
        for name, value in environ_for(folder, **ours).items():
            monkeypatch.setenv(name, value)

    return settle


def shown(up: UsherUp, text: str) -> bool:
    return any("message_shown" in line and text in line for line in up.lines)


def test_from_start_to_ctrl_c(folder: Path) -> None:
    with UsherUp(folder, "--consumers", "2", "--proof") as up:
        until(lambda: (up.state / "logs" / "proof.log").exists() == can_prove(), 10, "proofs, if they can be")
        told = up.told()
        assert told["pid"] == up.process.pid
        assert stat.S_IMODE((up.state / "up.json").stat().st_mode) == 0o600
        assert {row["name"] for row in up.consumers()} == {"consumer-1", "consumer-2"}
        assert "built in" in up.output
        password = (up.state / "redis" / "password").read_text().strip()
        assert password not in up.output

        # Any client in any language.
        port = told["redis_url"].rpartition(":")[2].partition("/")[0]
        client = [redis_cli(), "-p", port, "XADD", "ticket_stream", "*", "ticket_id", "42", "text", "hello"]
        done = subprocess.run(
            client, env={"REDISCLI_AUTH": password}, capture_output=True, text=True, check=True, timeout=10
        )
        until(lambda: shown(up, f"id={done.stdout.strip()}"), 10, "the message is handled and shown")
        assert up.run("send", "--ticket", "43", "text=from usher send").returncode == 0
        until(lambda: shown(up, "ticket=43"), 10, "the second message is handled")

        second = up.run("up", "--port", "1")
        assert second.returncode == 2
        assert f"process {up.process.pid}" in second.stderr
        assert up.process.poll() is None

        assert up.end(signal.SIGINT) == 130
        assert not processes_of(folder)
        assert not (up.state / "up.json").exists()
        assert up.run("send", "--ticket", "1").returncode == 2


@pytest.mark.slow
def test_data_and_ports_are_kept_over_a_restart(folder: Path) -> None:
    with UsherUp(folder, "--consumers", "1") as first:
        url = first.told()["redis_url"]
        link = Link(url, "test")
        link.call("SET", "kept", "yes")
        link.close()
        assert first.end(signal.SIGTERM) == 0
    with UsherUp(folder, "--consumers", "1") as second:
        assert second.told()["redis_url"] == url
        link = Link(url, "test")
        assert link.call("GET", "kept") == b"yes"
        link.close()
        assert second.end(signal.SIGHUP) == 0


def test_a_killed_consumer_comes_back_and_its_ticket_goes_on(folder: Path) -> None:
    with UsherUp(folder, "--consumers", "1", USHER_LEASE_SECONDS="2") as up:
        (before,) = up.consumers()
        for process in processes_of(folder):
            if "consumer" in words_of(process):
                process.kill()
        assert up.run("send", "--ticket", "42", "text=later").returncode == 0
        until(lambda: shown(up, "ticket=42"), 40, "the message is handled by the next incarnation")
        assert "exited: consumer-1" in up.output
        (after,) = [row for row in up.consumers() if row["state"] == "live"]
        assert after["incarnation"] != before["incarnation"]
        assert up.end(signal.SIGTERM) == 0


@pytest.mark.slow
def test_a_consumer_that_does_not_come_back_is_told_by_the_status_with_its_log(folder: Path) -> None:
    """Its program was changed under it, say: it ends before it registers, again and again, and soon it is on no roster
    any more."""
    (folder / "mine.py").write_text("def handle(message): ...\n")
    with UsherUp(folder, "--consumers", "2", "--handler", "mine:handle", USHER_LEASE_SECONDS="2") as up:
        well = up.run("status")
        assert (well.returncode, "not alive" in well.stdout) == (0, False)
        (folder / "mine.py").write_text("def handle(message):\n")
        for process in processes_of(folder):
            with contextlib.suppress(psutil.NoSuchProcess):  # a worker may end with its arbiter
                if "consumer" in words_of(process):
                    process.kill()
        until(lambda: up.run("status").returncode == 1, 30, "one of them is lost")
        until(lambda: not [row for row in up.consumers() if row["state"] != "lost"], 30, "both are lost")
        told = "".join(up.run("status").stdout.split())  # without its line breaks
        for name in ("consumer-1", "consumer-2"):
            assert f"{name}of`usherup`isnotalive;itslogmaysaywhy:{up.state}/logs/{name}.log" in told
        until(
            lambda: up.output.count("usher: USHER_HANDLER=mine:handle cannot be imported") >= 2,
            20,
            "both have said why",
        )
        document = up.run("status", "--json")
        assert (document.returncode, set(json.loads(document.stdout)["missing_consumers"])) == (
            0,
            {"consumer-1", "consumer-2"},
        )
        assert up.end(signal.SIGTERM) == 0


@pytest.mark.slow
def test_a_killed_redis_comes_back(folder: Path) -> None:
    with UsherUp(folder, "--consumers", "1", USHER_LEASE_SECONDS="2") as up:
        for process in processes_of(folder):
            if process.name() in REDIS:
                process.kill()
        until(lambda: "exited: redis" in up.output, 10, "it is told")
        until(lambda: up.run("send", "--ticket", "42", "text=after").returncode == 0, 20, "Redis is back")
        until(lambda: shown(up, "ticket=42"), 40, "messages flow again")
        assert up.end(signal.SIGTERM) == 0


@pytest.mark.slow
def test_when_supervisord_is_killed_everything_ends_and_the_exit_code_is_1(folder: Path) -> None:
    with UsherUp(folder, "--consumers", "1") as up:
        for process in processes_of(folder):
            if "supervisord" in words_of(process):
                process.kill()
        assert up.process.wait(60) == 1
        assert "supervisord has ended unexpectedly" in up.output
        assert not processes_of(folder)


def test_when_usher_up_itself_is_killed_everything_ends(folder: Path) -> None:
    with UsherUp(folder, "--consumers", "1") as up:
        up.process.kill()
        until(lambda: not processes_of(folder), 60, "the kernel told supervisord")
        assert up.run("send", "--ticket", "1").returncode == 2  # up.json is still there, its process is not


def test_a_handler_of_the_users_own_folder_and_a_second_ctrl_c(folder: Path) -> None:
    (folder / "common").mkdir()  # a project may have such a folder, as long as its handler does not need it
    (folder / "shop.py").write_text(
        "import time, pathlib\ndef handle(message):\n   "
        " pathlib.Path(message.fields['text']).write_text(message.ticket_id)\n    time.sleep(60)\n"
    )
    with UsherUp(folder, "--consumers", "1", "--handler", "shop:handle") as up:
        assert up.run("send", "--ticket", "42", "text=made-by-handler").returncode == 0
        until(lambda: (folder / "made-by-handler").exists(), 20, "the handler ran, in the user's folder")
        up.process.send_signal(signal.SIGINT)
        until(lambda: "draining" in up.output, 10, "it waits for the handler")
        assert up.process.poll() is None
        assert up.end(signal.SIGINT, within_s=10) == 130


@pytest.mark.slow
def test_a_changed_handler_is_loaded_anew(folder: Path) -> None:
    handler = folder / "shop.py"
    handler.write_text("def handle(message):\n    print('before', message.fields['n'], flush=True)\n")
    with UsherUp(folder, "--reload", "--consumers", "1", "--handler", "shop:handle") as up:
        up.run("send", "--ticket", "42", "n=1")
        until(lambda: "before 1" in up.output, 20, "the first handler")
        handler.write_text("def handle(message):\n    print('and after', message.fields['n'], flush=True)\n")
        until(lambda: "shop.py changed" in up.output, 20, "the change was seen")
        until(lambda: "consumer_drained" in up.output or "drain" in up.output, 30, "the consumer has drained")
        up.run("send", "--ticket", "42", "n=2")
        until(lambda: "and after 2" in up.output, 40, "the changed handler")
        assert up.end(signal.SIGINT) == 130


@pytest.mark.slow
def test_a_supervisord_that_hangs_does_not_hold_up_a_second_ctrl_c(folder: Path) -> None:
    with UsherUp(folder, "--consumers", "1") as up:
        for process in processes_of(folder):
            if "supervisord" in words_of(process):
                process.suspend()
        time.sleep(1.5)  # it has been asked for its programs since
        up.process.send_signal(signal.SIGINT)
        until(lambda: "usher: stopping" in up.output, 10, "Ctrl-C is heard")
        assert up.end(signal.SIGINT, within_s=10) == 130
        assert not processes_of(folder)


@pytest.mark.parametrize(
    ("when", "number", "code"),
    [
        ("usher: checking settings", signal.SIGTERM, 0),
        ("usher: starting 2 masters", signal.SIGINT, 130),
        ("Usher is up.", signal.SIGTERM, 0),
    ],
)
def test_the_exit_code_of_a_stop_is_the_same_whenever_it_comes(folder: Path, when: str, number: int, code: int) -> None:
    """As a terminal does it: the signal goes to the whole process group, so to the check of settings too, which then
    ends early."""
    env = environ_for(folder, USHER_STATE_DIR=str(folder / "state"), USHER_PORT=str(free_port(2)))
    command = [*UP, "--consumers", "1"]
    with subprocess.Popen(
        command,
        env=env,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as up:
        try:
            assert up.stdout is not None
            assert any(line.startswith(when) for line in up.stdout), "it comes so far"
            os.killpg(up.pid, number)
            output = up.stdout.read()
            assert up.wait(60) == code, output
            assert "Traceback" not in output
            until(lambda: not processes_of(folder), 10, "nothing is left")
        finally:
            kill_all_of(folder)


@pytest.mark.parametrize(
    ("words", "environ", "told"),
    [
        (["--handler", "nowhere:f"], {}, "USHER_HANDLER"),
        (["--handler", "broken:f"], {}, "USHER_HANDLER"),
        (["--handler", "leaving:f"], {}, "USHER_HANDLER"),
        (["--consumers", "0"], {}, "USHER_CONSUMERS"),
        ([], {"USHER_CONCURRENCY": "none", "USHER_BACKLOG_LIMIT": "-1"}, "USHER_CONCURRENCY"),
        ([], {"USHER_CONCURENCY": "4"}, "did you mean USHER_CONCURRENCY"),
        (["--redis-url", "redis://:hush@127.0.0.1:1/0"], {}, "USHER_REDIS_URL"),
        (["--redis-url", "http://127.0.0.1"], {}, "USHER_REDIS_URL"),
        (["--state-dir", "/proc/nothing"], {}, "USHER_STATE_DIR"),
        (["--state-dir", "50%"], {}, "USHER_STATE_DIR: supervisord cannot use a folder with % in its name"),
        (
            ["--state-dir", "~nobody-has-this-name/usher"],
            {},
            "USHER_STATE_DIR: ~nobody-has-this-name/usher cannot be used",
        ),
        (["--redis-server", "nowhere"], {}, "USHER_REDIS_SERVER: there is no program 'nowhere'"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    folder: Path,
    words: list[str],
    environ: dict[str, str],
    told: str,
    here: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    (folder / "broken.py").write_text("import not_there_at_all\n")
    (folder / "leaving.py").write_text("raise SystemExit(0)\n")
    here(**environ)
    assert usher("up", *words) == 2
    said = capsys.readouterr().err
    assert told in said
    assert "Traceback" not in said
    assert "hush" not in said
    assert not (folder / "state" / "up.json").exists()
    assert not (folder / "state" / "logs" / "supervisord.log").exists()


def test_one_message_names_every_bad_setting_of_usher_up_and_of_its_programs(folder: Path) -> None:
    bad = {
        "USHER_CONCURENCY": "3",
        "USHER_LEASE_SECOND": "3",
        "USHER_MAX_ATTEMPTS": "x",
        "USHER_BACKLOG_LIMIT": "-1",
        "USHER_GROUP": "a b",
    }
    env = environ_for(folder, USHER_STATE_DIR=str(folder / "state"), **bad)
    done = subprocess.run(
        [*UP, "--consumers", "0"], env=env, cwd=folder, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2
    first, *lines = done.stderr.splitlines()
    assert first == "usher: These settings cannot be used:"
    assert sorted(line.strip().split(":")[0].split(" is not")[0] for line in lines) == sorted([*bad, "USHER_CONSUMERS"])
    for mistyped, meant in (("USHER_CONCURENCY", "USHER_CONCURRENCY"), ("USHER_LEASE_SECOND", "USHER_LEASE_SECONDS")):
        assert f"  {mistyped} is not a setting; did you mean {meant}?" in lines


def test_the_port_of_redis_may_not_be_one_of_the_masters(folder: Path) -> None:
    port = free_port(2)
    with pytest.raises(StartRefused, match=f"USHER_REDIS_PORT: {port + 1} is a port of the masters too .USHER_PORT"):
        Supervision(LocalSettings(port=port, redis_port=port + 1, state_dir=folder), {})
    planned = [Supervision(LocalSettings(port=port, state_dir=folder), environ_for(folder)) for _ in range(2)]
    assert planned[0].redis_port == planned[1].redis_port not in (port, port + 1)
    with pytest.raises(StartRefused, match="too long for the sockets in it"):
        Supervision(LocalSettings(port=port, state_dir=folder / ("x" * 80)), {})


def test_the_program_of_redis_that_is_asked_for_is_told_to_who_starts_it(folder: Path) -> None:
    own = folder / "own-redis"
    own.symlink_to(find_redis_server())
    planned = Supervision(
        LocalSettings(port=free_port(2), state_dir=folder, redis_server=str(own)), environ_for(folder)
    )
    assert planned.environ["USHER_REDIS_SERVER"] == str(own)


def test_another_server_in_the_place_of_a_master_is_no_master(folder: Path) -> None:
    """Somebody may have taken the port after it was looked at; a Redis closes the connection of a browser, others
    answer in their own way."""
    with (
        EmbeddedRedis(folder / "other", port=0, durable=False) as other,
        socket.create_server(("127.0.0.1", 0)) as greeting,
    ):

        def greet() -> None:
            with greeting.accept()[0] as connection:
                connection.sendall(b"220 mail.example ESMTP\r\n")

        threading.Thread(target=greet, daemon=True).start()
        for port in (urlsplit(other.url).port, greeting.getsockname()[1]):
            well, why = is_well(f"http://127.0.0.1:{port}")
            assert not well
            assert why
        assert not somebody_leads([other.url.replace("redis", "http")])


@pytest.mark.slow
def test_while_what_a_killed_run_has_left_drains_another_one_is_refused(folder: Path) -> None:
    (folder / "shop.py").write_text(
        "import time, pathlib\ndef handle(message):\n    pathlib.Path('begun').touch()\n    time.sleep(5)\n"
    )
    words = ("--consumers", "1", "--handler", "shop:handle")
    with UsherUp(folder, *words) as first:
        assert first.run("send", "--ticket", "42").returncode == 0
        until(lambda: (folder / "begun").exists(), 20, "the handler runs")
        first.process.kill()
        first.process.wait(10)
        again = first.run("up", *words, "--port", str(first.port))
        assert (again.returncode, "the run before was killed, and its programs still drain" in again.stderr) == (
            2,
            True,
        )
        until(lambda: not processes_of(folder), 30, "it has drained")


@pytest.mark.slow
def test_the_last_words_of_a_program_are_those_of_this_run(folder: Path) -> None:
    (folder / "shop.py").write_text(
        "import sys\nif 'consumer' in sys.argv: raise RuntimeError('only here')\ndef handle(message): ...\n"
    )
    logs = folder / "state" / "logs"
    logs.mkdir(parents=True, mode=0o700)
    (logs / "consumer-1.log").write_text("said by an earlier run\n" * 9)
    env = environ_for(folder, USHER_STATE_DIR=str(folder / "state"), USHER_PORT=str(free_port(2)))
    words = [*UP, "--consumers", "1", "--handler", "shop:handle"]
    done = subprocess.run(words, env=env, cwd=folder, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "consumer-1 did not start" in done.stderr
    assert "only here" in done.stderr
    assert "earlier run" not in done.stderr


@pytest.mark.parametrize("setting", ["USHER_PORT", "USHER_REDIS_PORT"])
def test_a_port_in_use_is_named(
    folder: Path, setting: str, here: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        here(**{setting: str(taken.getsockname()[1])})
        assert usher("up") == 2
    assert setting in capsys.readouterr().err


@pytest.mark.slow
def test_the_configuration_works_with_plain_supervisord(folder: Path) -> None:
    """As the header of deploy/supervisord.conf says, with a password chosen by the user."""
    state = folder / "state"
    (state / "logs").mkdir(parents=True)
    (state / "redis").mkdir(mode=0o700)
    (state / "redis" / "password").write_text("chosen\n")
    port, redis_port = free_port(), free_port()
    base = environ_for(
        folder,
        USHER_HANDLER="usher.deploy.demo.handlers:show",
        USHER_REDIS_URL=f"redis://:chosen@127.0.0.1:{redis_port}/0",
    )
    env = environment(base, LocalSettings(masters=1, port=port), state, redis_port)
    env |= {"USHER_AUTOSTART": "true", "USHER_EMBEDDED_REDIS": "true"}
    with (folder / "out").open("wb") as out:
        supervisord = subprocess.Popen(
            ["supervisord", "-c", str(CONFIGURATION)], env=env, cwd=folder, stdout=out, stderr=out
        )
        try:
            until(lambda: len(living_consumers([f"http://127.0.0.1:{port}"])) == 2, 60, "both consumers are registered")
            supervisord.send_signal(signal.SIGTERM)
            assert supervisord.wait(60) == 0
            assert os.listdir(state / "logs")
        finally:
            kill_all_of(folder)
            supervisord.wait(10)


def test_too_few_open_files_are_told_with_what_to_do(folder: Path) -> None:
    env = environ_for(folder, USHER_STATE_DIR=str(folder / "state"), USHER_PORT=str(free_port(2)))
    script = 'ulimit -n 64; (ulimit -n 1024) 2>/dev/null && exit 77; exec "$@"'
    done = subprocess.run(
        ["sh", "-c", script, "sh", *UP], env=env, cwd=folder, capture_output=True, text=True, check=False, timeout=60
    )
    if done.returncode == 77:
        pytest.skip("this user may raise it again, and supervisord does")
    assert done.returncode == 2
    assert '1024 as per the "minfds"' in done.stderr


@pytest.mark.slow
def test_warnings_that_are_errors_are_those_of_the_programs(folder: Path) -> None:
    with UsherUp(folder, "--consumers", "1", PYTHONWARNINGS="error") as up:
        assert up.end(signal.SIGTERM) == 0


@pytest.mark.slow
def test_a_full_disk_behind_the_output_stops_nothing(folder: Path) -> None:
    env = environ_for(folder, USHER_STATE_DIR=str(folder / "state"), USHER_PORT=str(free_port(2)))
    with (
        Path("/dev/full").open("w") as full,
        subprocess.Popen(UP, env=env, cwd=folder, stdout=full, stderr=subprocess.PIPE) as up,
    ):
        try:
            until(lambda: (folder / "state" / "logs" / "consumer-2.log").exists(), 60, "all is started")
            time.sleep(3)
            assert up.poll() is None
            assert (
                subprocess.run(
                    [*USHER, "send", "--ticket", "42"], env=env, cwd=folder, check=False, timeout=20
                ).returncode
                == 0
            )
            up.send_signal(signal.SIGTERM)
            _, told = up.communicate(timeout=60)
            assert b"everything has stopped" in told
        finally:
            kill_all_of(folder)


def test_an_output_that_nobody_reads_any_more_ends_it_in_order(folder: Path) -> None:
    env = environ_for(folder, USHER_STATE_DIR=str(folder / "state"), USHER_PORT=str(free_port(2)))
    with subprocess.Popen(UP, env=env, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as up:
        try:
            assert up.stdout is not None and up.stderr is not None
            assert any(line.startswith(b"Usher is up.") for line in up.stdout)
            up.stdout.close()
            # Not a message: on a busy machine programs log before it is sent, and then Redis is gone already.
            (folder / "state" / "logs" / "loud.log").write_text("a line\n")
            assert b"everything has stopped" in up.stderr.read()
            assert up.wait(60) == 2
            assert not processes_of(folder)
        finally:
            kill_all_of(folder)


@pytest.mark.slow
def test_an_output_that_nobody_reads_stops_no_end(folder: Path) -> None:
    env = environ_for(folder, USHER_STATE_DIR=str(folder / "state"), USHER_PORT=str(free_port(2)))
    with subprocess.Popen(UP, env=env, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as up:
        try:
            assert up.stdout is not None and up.stderr is not None
            assert any(line.startswith(b"Usher is up.") for line in up.stdout)
            (folder / "state" / "logs" / "loud.log").write_text(("x" * 9000 + "\n") * 100)  # more than a pipe holds
            time.sleep(2)
            up.send_signal(signal.SIGTERM)
            assert up.wait(60) == 0
            assert b"everything has stopped" in up.stderr.read()
        finally:
            kill_all_of(folder)
