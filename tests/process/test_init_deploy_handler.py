"""`usher init-deploy` and the handler: what its programs will find when they run in the folder, and not who wrote it in a project."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.process.machine import ROOT, USHER, environ_for

pytestmark = pytest.mark.process


def written(home: Path, handler: str, cwd: Path, **environ: str) -> tuple[dict[str, str], str, str]:
    """Variables of usher.env, what was said, and what was warned of. The folder is written in any case: the handler may come later."""
    environ = environ_for(home) | {"PYTHONPATH": str(ROOT)} | environ
    words = [*USHER, "init-deploy", str(home / "srv"), "--handler", handler]
    done = subprocess.run(words, env=environ, cwd=cwd, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return dict(re.findall(r"(\w+)='(.*)'", (home / "srv" / "usher.env").read_text())), done.stdout, done.stderr


def as_a_service(home: Path, settings: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """The check of settings and handler where the programs will run, and with what they will get."""
    environ = environ_for(home) | {"PYTHONPATH": str(ROOT)}
    environ |= settings | {"PYTHONPATH": f"{settings.get('PYTHONPATH', '')}:{ROOT}"}
    return subprocess.run([*USHER, "preflight"], env=environ, cwd=home / "srv", capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture
def project(folder: Path) -> Path:
    made = folder / "project"
    made.mkdir()
    (made / "shop.py").write_text("def handle(message): ...\n")
    return made


def test_a_handler_of_the_current_folder_is_found_by_the_service_too(folder: Path, project: Path) -> None:
    settings, said, warned = written(folder, "shop:handle", project)
    assert settings["PYTHONPATH"].split(":")[0] == str(project)
    assert f"The handler is found by PYTHONPATH={project}" in said
    assert warned == ""
    assert as_a_service(folder, settings).returncode == 0
    assert f"PYTHONPATH` ({settings['PYTHONPATH']})" in (folder / "srv" / "README.md").read_text()


def test_what_the_shell_names_is_named_to_the_service(folder: Path, project: Path) -> None:
    settings, _, warned = written(folder, "shop:handle", folder, PYTHONPATH=f"{ROOT}:{project}")
    assert (settings["PYTHONPATH"], warned) == (f"{ROOT}:{project}", "")


def test_one_that_is_installed_needs_nothing(folder: Path, project: Path) -> None:
    settings, _, warned = written(folder, "common.demo.handlers:show", project)
    assert ("PYTHONPATH" in settings, warned) == (False, "")


def test_one_that_is_nowhere_is_told_with_the_command_for_later(folder: Path, project: Path) -> None:
    settings, _, warned = written(folder, "missing:handle", project)
    assert "no consumer will start: USHER_HANDLER=missing:handle: there is no module 'missing'" in warned
    assert f"init-deploy {folder / 'srv'} --force" in warned
    assert "PYTHONPATH" not in settings
    assert as_a_service(folder, settings).returncode == 2


def test_a_project_that_has_a_name_of_ours_hides_nothing(folder: Path, project: Path) -> None:
    (project / "common.py").write_text("raise RuntimeError('the wrong common')")
    settings, _, warned = written(folder, "shop:handle", project)
    assert (settings["PYTHONPATH"].split(":")[0], warned) == (str(project), "")
    assert as_a_service(folder, settings).returncode == 0
