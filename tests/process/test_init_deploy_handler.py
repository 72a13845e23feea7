"""`usher init-deploy` and the handler: what its programs will find where they run, and not who wrote it in a
project."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.nightly import more
from tests.process.machine import ROOT, USHER, environ_for
from tests.tls_front import Papers

pytestmark = pytest.mark.process


class Written(NamedTuple):
    """Variables of usher.env, where consumers run, what was said, and what was warned of: then the exit code is 1."""

    settings: dict[str, str]
    directory: str
    said: str
    warned: str


def written(home: Path, handler: str, cwd: Path, **environ: str) -> Written:
    """The folder is written in any case: the handler may come later."""
    words = [*USHER, "init-deploy", str(home / "srv"), "--handler", handler]
    done = subprocess.run(
        words, env=environ_for(home) | environ, cwd=cwd, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == (1 if "no consumer will start" in done.stderr else 0), done.stderr
    settings = dict(re.findall(r"(\w+)='(.*)'", (home / "srv" / "usher.env").read_text()))
    directories = re.findall(r"^directory = (.*)$", (home / "srv" / "supervisord.conf").read_text(), re.MULTILINE)
    assert len(directories) in (0, 2), "it is said of both consumers, and of nobody else"
    return Written(settings, directories[0] if directories else str(home / "srv"), done.stdout, done.stderr)


def as_a_service(home: Path, made: Written) -> int:
    """Exit code of the check of settings and handler where the consumers will run, and with what they will get."""
    environ = {name: value for name, value in environ_for(home).items() if name != "PYTHONPATH"} | made.settings
    return subprocess.run(
        [*USHER, "preflight"], env=environ, cwd=made.directory, capture_output=True, check=False, timeout=60
    ).returncode


@pytest.fixture
def project(folder: Path) -> Path:
    made = folder / "project"
    made.mkdir()
    (made / "shop.py").write_text("def handle(message): ...\n")
    return made


@pytest.mark.parametrize("beside", [*more("nothing.py", "common.py"), "queue.py"])
def test_a_handler_of_the_current_folder_is_found_by_the_service_too(folder: Path, project: Path, beside: str) -> None:
    """And what else is there hides nothing of Usher's or of Python's."""
    (project / beside).write_text("raise RuntimeError('the wrong one')")
    made = written(folder, "shop:handle", project)
    assert (made.directory, made.warned) == (str(project), "")
    assert f"Consumers run in {project}, where the module of their handler is" in made.said
    assert as_a_service(folder, made) == 0
    assert f"cd {project} && usher preflight" in (folder / "srv" / "README.md").read_text()


def test_what_the_shell_names_is_named_to_the_service(folder: Path, project: Path) -> None:
    made = written(folder, "shop:handle", folder, PYTHONPATH=f"{ROOT}:{project}")
    assert (made.settings["PYTHONPATH"], made.warned) == (f"{ROOT}:{project}", "")
    assert made.directory == str(folder / "srv")
    assert as_a_service(folder, made) == 0


def test_one_that_is_installed_needs_nothing(folder: Path, project: Path) -> None:
    made = written(folder, "usher.deploy.demo.handlers:show", project, PYTHONPATH="")
    assert ("PYTHONPATH" in made.settings, made.directory, made.warned) == (False, str(folder / "srv"), "")


def test_one_that_is_nowhere_is_told_with_the_command_for_later(folder: Path, project: Path) -> None:
    made = written(folder, "missing:handle", project)
    assert "no consumer will start: USHER_HANDLER=missing:handle: there is no module 'missing'" in made.warned
    assert f"init-deploy {folder / 'srv'} --force" in made.warned
    assert as_a_service(folder, made) == 2


def test_in_the_folder_that_the_warning_names_the_handler_is_found_when_it_has_come(
    folder: Path, project: Path
) -> None:
    made = written(folder, "late:handle", project)
    assert "no consumer will start" in made.warned
    (folder / "srv" / "late.py").write_text("def handle(message): ...\n")
    assert as_a_service(folder, made) == 0


def again(home: Path, command: str) -> subprocess.CompletedProcess[str]:
    """What a person does with a command that was told, in a shell that has no settings."""
    script = f'usher() {{ {shlex.join(USHER)} "$@"; }}\n{command}'
    environ = environ_for(home) | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        ["bash", "-c", script], env=environ, cwd=home, capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.slow
def test_the_command_for_later_keeps_handler_masters_and_secrets(folder: Path, project: Path) -> None:
    """It ran with none of them: consumers of the example handler acknowledged what was sent, and all passwords were
    others."""
    made = written(folder, "late:handle", project, USHER_MASTER_URLS="http://127.0.0.1:9700")
    (folder / "srv" / "late.py").write_text("def handle(message): ...\n")
    _, _, command = made.warned.strip().partition("Once that is mended: ")
    before = (folder / "srv" / "usher.env").read_text()
    done = again(folder, command)
    assert (done.returncode, done.stderr) == (0, "")
    after = (folder / "srv" / "usher.env").read_text()
    assert [line for line in after.splitlines() if "PYTHONPATH" not in line] == before.splitlines()


@pytest.mark.slow
def test_secrets_that_the_shell_has_not_are_not_written_over(folder: Path, project: Path) -> None:
    made = written(folder, "shop:handle", project)
    before = (folder / "srv" / "usher.env").read_text()
    words = "--force --handler shop:handle"
    done = again(folder, f"usher init-deploy {folder / 'srv'} {words}")
    assert (done.returncode, (folder / "srv" / "usher.env").read_text()) == (2, before)
    assert f"set -a; . {folder / 'srv' / 'usher.env'}; set +a" in done.stderr
    assert made.settings["USHER_API_TOKEN"] in before


def test_the_runbook_finds_the_command_also_where_consumers_run_in_a_project(folder: Path, project: Path) -> None:
    written(folder, "shop:handle", project)
    [more] = re.findall(r"^again=.*\n.*--consumers 3.*$", (ROOT / "deploy" / "runbook.md").read_text(), re.MULTILINE)
    done = again(folder, f"set -e; cd {folder / 'srv'}; set -a; . ./usher.env; set +a\n{more}")
    assert (done.returncode, done.stderr) == (0, "")
    conf = (folder / "srv" / "supervisord.conf").read_text()
    assert (conf.count("[program:consumer-"), conf.count(f"\ndirectory = {project}\n")) == (3, 3)


def test_files_are_named_so_that_programs_find_them_from_their_own_folders(folder: Path, project: Path) -> None:
    """Masters and consumers run elsewhere: none of them started."""
    papers = Papers(project)
    tls = {
        name: str(path.relative_to(project))
        for name, path in (("USHER_TLS_CERT", papers.cert), ("USHER_TLS_KEY", papers.key))
    }
    made = written(folder, "shop:handle", project, **tls)
    assert (made.settings["USHER_TLS_CERT"], made.settings["USHER_TLS_KEY"]) == (str(papers.cert), str(papers.key))
