"""The `usher` command: what it imports, what it says, and its exit codes."""

from __future__ import annotations

import ast
import asyncio
import importlib.metadata
import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

import usher as public
from tests.commands import usher as here
from usher import cli
from usher.common.base.errors import SettingsError
from usher.common.runtime.own_command import usher_command
from usher.deploy.local.up import Relay

ROOT = Path(__file__).resolve().parents[2]


def usher(
    *words: str, cwd: Path = ROOT, start: tuple[str, ...] = ("-m", "usher"), **environ: str
) -> subprocess.CompletedProcess[str]:
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HOME": str(cwd), **environ}
    return subprocess.run(
        [sys.executable, *start, *words], cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=60
    )


def package(folder: Path, name: str, text: str = "") -> None:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(text)


def test_help_lists_every_command_and_imports_none_of_them() -> None:
    ours = "('redis', 'flask')"
    look = (
        "import sys; from usher.cli import run, COMMANDS; code = run(['--help']);"
        "print([name for name in sys.modules if name.split('.')[0] in "
        + ours
        + " or name.startswith(('usher.common.cli', 'usher.master', 'usher.consumer', 'usher.deploy'))]);sys.exit(code)"
    )
    done = usher(start=("-c", look))
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("[]")
    for name, listed in cli.COMMANDS.items():
        assert f"  {name} " in done.stdout
        assert listed[1].split(":")[0] in " ".join(done.stdout.split())


@pytest.mark.parametrize(("word", "meant"), [("stauts", "status"), ("consumer s", "consumers"), ("zzz", None)])
def test_a_misspelt_command_is_told_which_one_may_be_meant(
    word: str, meant: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert here(word) == 2
    told = capsys.readouterr().err
    assert f"No such command '{word}'." in told
    assert re.findall(r"Did you mean '(.*)'", told) == ([meant] if meant else [])


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("usher de", {"demo", "dead", "delayed"}),
        ("usher tickets ex", {"explain"}),
        ("usher up --cons", {"--consumers"}),
    ],
)
def test_the_shell_completes_as_the_help_says(line: str, offered: set[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert here("--help") == 0
    assert "_USHER_COMPLETE=bash_source" in capsys.readouterr().out
    asked = {"_USHER_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    done = usher(start=("-c", "from usher.cli import main; main()"), **asked)
    assert {word.partition(",")[2] for word in done.stdout.split()} == offered


@pytest.mark.parametrize(
    "words",
    [
        *(("nope",), ("send", "--nope"), ("send",), ("send", "--csv", "x")),
        *(("audit", "--every", "nan"), ("report", "--every", "nan")),
        ("send", "--simulate", "1", "--ticket", "2"),
        ("send", "a=b"),
        ("run", "orders:handle", "--handler", "orders:other"),
    ],
)
def test_wrong_usage_is_exit_code_2(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert here(*words) == 2
    told = capsys.readouterr().err
    assert "Error: " in told
    assert "Traceback" not in told


def test_our_errors_are_one_message_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    @click.command()
    def broken() -> None:
        raise SettingsError(["USHER_X: is wrong", "USHER_Y: too"])

    monkeypatch.setattr(cli, "load_command", lambda target: broken)
    assert cli.run(["up"]) == 2
    assert capsys.readouterr().err == "usher: These settings cannot be used:\n  USHER_X: is wrong\n  USHER_Y: too\n"


def test_ctrl_c_while_it_imports_is_130_too() -> None:
    early = "import sys, os; sys.argv[0] = '/bin/usher'; import usher.cli; os.kill(os.getpid(), 2)"
    done = usher(start=("-c", early))
    assert (done.returncode, done.stderr) == (130, "")


def test_ctrl_c_is_130_and_a_commands_own_code_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    @click.argument("how")
    def ending(how: str) -> None:
        if how == "interrupt":
            raise KeyboardInterrupt
        click.get_current_context().exit(1)

    monkeypatch.setattr(cli, "load_command", lambda target: ending)
    assert cli.run(["up", "interrupt"]) == 130
    assert cli.run(["up", "exit"]) == 1


@pytest.mark.parametrize(
    "problem", [RuntimeError, BrokenPipeError, EOFError, ModuleNotFoundError, MemoryError, OSError]
)
def test_an_error_that_nobody_expected_is_exit_code_2_with_its_traceback(
    problem: type[Exception], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 would say that an audit, a doctor or a replay has found something."""

    @click.command()
    def broken() -> None:
        raise problem("of a socket")

    monkeypatch.setattr(cli, "load_command", lambda target: broken)
    with Path(os.devnull).open("w") as out:
        monkeypatch.setattr(sys, "stdout", out)  # has a number, as that of a program
        assert cli.run(["audit"]) == 2
    told = capsys.readouterr().err
    assert "in broken" in told and "of a socket" in told
    assert told.endswith("usher: this error was not expected, so the command could not be done\n")


def test_a_command_whose_output_nobody_reads_any_more_ends_without_a_word_and_not_as_if_it_had_found_something() -> (
    None
):
    code = "import sys; from usher.cli import run; sys.exit(run(['acl']))"
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as gone:
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, stdout=gone, stderr=subprocess.PIPE, check=False, timeout=60
        )
    assert (done.returncode, done.stderr) == (2, b"")


def test_without_redis_and_usher_up_a_command_says_so(tmp_path: Path) -> None:
    done = usher("send", "--simulate", "1", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("usher: USHER_REDIS_URL is empty, and no `usher run` or `usher up` runs here")


def test_what_a_command_imports_is_not_searched_for_garbage() -> None:
    """Not while it is imported, nor later: that took a quarter of the start of a master."""
    look = (
        "import gc; from usher import cli; before = gc.get_stats()[0]['collections'];"
        "cli.run = lambda: cli.load_command('usher.' + cli.COMMANDS['master'][0]) and print("
        "gc.isenabled(), gc.get_freeze_count() > 10_000, gc.get_stats()[0]['collections'] - before < 10); cli.main()"
    )
    done = usher(start=("-c", look))
    assert done.stdout.split() == ["True", "True", "True"], done.stderr


def test_usher_runs_by_path_in_a_folder_with_packages_of_any_name(tmp_path: Path) -> None:
    for name in ("common", "master", "consumer", "deploy", "usher"):
        package(tmp_path, name, "raise RuntimeError('not ours')")
    done = usher("--version", cwd=tmp_path, start=(str(ROOT / "usher" / "__main__.py"),), PYTHONPATH=str(tmp_path))
    assert (done.returncode, str(ROOT) in done.stdout) == (0, True), done.stderr


def test_importing_usher_loads_nothing_else() -> None:
    look = "import sys; before = set(sys.modules); import usher; print(sorted(set(sys.modules) - before))"
    loaded = ast.literal_eval(usher(start=("-c", look)).stdout)
    assert [name for name in loaded if name.partition(".")[0] not in sys.stdlib_module_names] == ["usher"]


def test_the_pytest_plugin_loads_nothing_of_ours_before_its_fixture_is_used() -> None:
    look = "import pytest, sys; before = set(sys.modules); import usher.consumer.torture.pytest_plugin"
    done = usher(start=("-c", f"{look}; print(sorted(set(sys.modules) - before))"))
    ours = ["usher", "usher.consumer", "usher.consumer.torture", "usher.consumer.torture.pytest_plugin"]
    assert [name for name in ast.literal_eval(done.stdout) if name.partition(".")[0] == "usher"] == ours


@pytest.mark.parametrize("name", public.__all__)
def test_every_public_name_is_there_and_a_page_tells_of_it(name: str) -> None:
    assert getattr(public, name) is not None
    assert f"`{name}`" in (ROOT / "docs" / "api.md").read_text(), "docs/api.md lists the public names"


def test_what_an_output_cannot_show_is_no_traceback() -> None:
    code = "import click; from usher.cli import run; c = click.Command('c', callback=lambda: print('K\\xf6ln'))"
    posix = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    told = usher(start=("-c", f"{code}; raise SystemExit(run([], c))"), **posix)
    assert (told.returncode, told.stdout) == (0, "K\\xf6ln\n"), told.stderr


class TestRelay:
    def test_a_rotation_loses_nothing(self, tmp_path: Path) -> None:
        path = tmp_path / "c.log"
        path.write_text("")
        relay = Relay(tmp_path)
        path.write_text("before\n")
        path.rename(tmp_path / "c.log.1")
        path.write_text("after\n")
        assert [*relay.lines(), *relay.lines()] == ["c            | before", "c            | after"]

    def test_control_characters_do_not_reach_the_terminal(self, tmp_path: Path) -> None:
        relay = Relay(tmp_path)
        (tmp_path / "c.log").write_bytes(b"\x1b[31mred\x07 \xff\n")
        assert relay.lines() == ["c            | \\x1b[31mred\\x07 \ufffd"]


def test_what_needs_an_extra_says_so_without_it_and_the_tables_of_an_outbox_need_none() -> None:
    program = "import sys; sys.modules['sqlalchemy'] = None; from usher.cli import run; sys.exit(run(sys.argv[1:]))"
    done = usher("streamer", "--migrate", "--outbox-url", "sqlite://", start=("-c", program))
    assert (done.returncode, "pip install -e '.[sql]' in Usher's folder" in done.stderr) == (2, True)
    done = usher("streamer", "--schema", "sqlite", start=("-c", program))
    assert (done.returncode, "CREATE TABLE" in done.stdout) == (0, True), done.stderr


_EVERY_HELP = """
import contextlib, io, json, sys
import click
from usher import cli

class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in set(json.loads(sys.argv[1])):
            raise ModuleNotFoundError(f"{name} is not here", name=name)

def paths(command, words):
    yield words
    for name in command.list_commands(None) if isinstance(command, click.Group) else ():
        yield from paths(command.get_command(None, name), [*words, name])

sys.meta_path.insert(0, Without())
seen, wrong = 0, {}
for name, listed in cli.COMMANDS.items():
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = cli.run([name, "--help"])
    for words in paths(cli.load_command(f"usher.{listed[0]}"), [name]) if code == 0 else ():
        seen += 1
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = code or cli.run([*words, "--help"])
    if code:
        wrong[name] = said.getvalue()
print(json.dumps([seen, wrong]))
"""


def test_the_help_of_every_command_needs_no_extra() -> None:
    """None of the modules that the extras bring can be imported, as where somebody installed Usher without any."""
    text = (
        (ROOT / "pyproject.toml")
        .read_text()
        .partition("[project.optional-dependencies]")[2]
        .partition("[project.scripts]")[0]
    )
    extras = {re.sub("[-_.]+", "-", name).lower() for name in re.findall(r'"([A-Za-z0-9_.-]+)', text)} - {
        "usher-streams"
    }
    modules = {
        module
        for module, brought_by in importlib.metadata.packages_distributions().items()
        if any(re.sub("[-_.]+", "-", name).lower() in extras for name in brought_by) and module.isidentifier()
    }
    assert {"sqlalchemy", "psycopg", "pyspark", "opentelemetry", "playwright"} <= modules
    done = usher(json.dumps(sorted(modules)), start=("-c", _EVERY_HELP))
    assert done.returncode == 0, done.stderr
    seen, wrong = json.loads(done.stdout)
    assert seen > len(cli.COMMANDS), "commands of groups too"
    assert wrong == {}


def test_commands_that_look_and_act_do_not_carry_a_web_server() -> None:
    """A fifth of the time that they take to start."""
    names = (*cli.PARTS["Look"], *cli.PARTS["Act"], "delayed", "rehearse", "send")
    modules = [cli.COMMANDS[name][0].partition(":")[0] for name in names]
    code = f"import sys, {', '.join(modules)}; sys.exit(str({{'flask', 'gunicorn'}} & set(sys.modules)))"
    assert usher(start=("-c", code)).stderr.strip() == "set()"


@pytest.mark.parametrize("program", ["master", "consumer"])
def test_a_program_that_nobody_gave_a_webhook_does_not_carry_requests(program: str) -> None:
    """Four MiB of each process, which it would never use."""
    code = f"import sys, usher.{program}.__main__; sys.exit('requests' in sys.modules)"
    assert usher(start=("-c", code)).returncode == 0


def test_a_full_disk_behind_the_output_is_told_in_one_line() -> None:
    with Path("/dev/full").open("wb") as full:
        command = [sys.executable, "-m", "usher", "--help"]
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, check=False, timeout=60)
    told = b"usher: the disk on which it writes, or to which its output goes, is full\n"
    assert (done.returncode, done.stderr) == (2, told)


@pytest.mark.parametrize(
    "words",
    [
        ["--group", "a b", "--redis-url=http://x", "actions", "--limit", "3"],
        ["actions", "--group", "a b", "--redis-url=http://x", "--limit", "3"],
        ["actions", "--limit", "3", "--redis-url", "http://x", "--group=a b"],
    ],
)
def test_shared_options_may_stand_before_a_command_and_behind_it(words: list[str]) -> None:
    done = CliRunner().invoke(cli.usher, words)
    assert [problem.partition(":")[0] for problem in getattr(done.exception, "problems", ())] == [
        "USHER_REDIS_URL",
        "USHER_GROUP",
    ]


def test_shared_options_are_refused_where_nothing_reads_them() -> None:
    for words in (["token", "new", "viewer", "a", "--group", "g"], ["--group", "g", "token", "new", "viewer", "a"]):
        done = CliRunner().invoke(cli.usher, words)
        assert done.exit_code == 2 and "No such option '--group'" in done.output
    masters = ["run", "orders:handle", "--master-urls", "http://127.0.0.1:1"]
    assert "No such option '--master-urls'" in CliRunner().invoke(cli.usher, masters).output
    with pytest.raises(SettingsError, match="no setting conccurency"):
        asyncio.run(public.running(package, conccurency="4").__aenter__())
    assert "No such option '--json'" in CliRunner().invoke(cli.usher, ["up", "--json"]).output
    shared = cli.usher.share()  # type: ignore[attr-defined]
    assert cli._hoisted(["send", "--", "--group", "g"], shared) == ["send", "--", "--group", "g"]
    assert cli._hoisted(["send", "--group"], shared) == ["--group", "send"]
    assert cli._hoisted(["send", "--json", "a=b"], shared) == ["--json", "send", "a=b"]


@pytest.mark.parametrize("words", ["audit", "report", "status", "doctor", "dead list", "trim"])
def test_sigterm_ends_a_command_with_a_line_as_ctrl_c_does(words: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        environ = {**os.environ, "USHER_REDIS_URL": f"redis://127.0.0.1:{silent.getsockname()[1]}/0"}
        given: dict[str, Any] = {"env": environ, "cwd": tmp_path, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(usher_command(*words.split()), **given) as running, silent.accept()[0]:
            running.terminate()
            _, said = running.communicate(timeout=30)
        assert (running.returncode, said.strip()) == (130, "usher: interrupted")
