"""The reference pages are made of the code, and nothing is missing in them; the site is built of all documents."""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import click
import pytest

from tests.rules import ROOT
from usher.cli import COMMANDS, load_command
from usher.common.protocol import keys
from usher.common.runtime.settings import name_of
from usher.master.audit.findings import CHECKS


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def first_cells(page: str) -> set[str]:
    return set(re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE))


def test_every_setting_is_told_and_ten_come_first(reference: ModuleType) -> None:
    page = reference.settings_page()
    assert first_cells(page) == {name_of(field) for cls in reference.PROGRAMS.values() for field in cls.model_fields}
    assert len(first_cells(page.partition("\n## All programs")[0])) == 10


def test_every_command_is_told(reference: ModuleType) -> None:
    def below(name: str, command: click.Command) -> list[str]:
        inner = command.commands.items() if isinstance(command, click.Group) else ()
        return [name, *(deeper for word, one in inner for deeper in below(f"{name} {word}", one) if not one.hidden)]

    told = re.findall(r"^### (.+)$", reference.commands_page(), re.MULTILINE)
    assert sorted(told) == sorted(
        deeper for name, one in COMMANDS.items() for deeper in below(f"usher {name}", load_command(one[0]))
    )


def test_examples_of_commands_stand_line_by_line(reference: ModuleType) -> None:
    told = reference.commands_page()
    assert re.search(r"^```\nusher replay --ticket 42 --since 2h .*\nusher replay --since ", told, re.MULTILINE)


def test_every_route_of_masters_and_consumers_is_told(reference: ModuleType) -> None:
    page = reference.http_page()
    assert {"### POST `/api/dead-letters/redrive`", "### GET `/api/lag`"} <= set(page.splitlines())
    named = set(re.findall(r"\]\(#(\w+)\)", page))
    assert named <= {heading.lower() for heading in re.findall(r"^### (\w+)$", page, re.MULTILINE)}


def test_metrics_of_dashboard_and_alerts_are_told(reference: ModuleType) -> None:
    told = {re.sub(r"\{.*", "", name) for name in first_cells(reference.metrics_page())}
    asked = (
        json.dumps(json.loads((ROOT / "deploy/grafana.json").read_text())) + (ROOT / "deploy/alerts.yml").read_text()
    )
    used = {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"\busher_\w+[a-z]", asked)}
    assert len(told) > 50
    assert used <= told


def test_every_key_is_told(reference: ModuleType) -> None:
    of_classes = [name for cls in (keys.LogKeys, keys.Keys) for name in vars(cls) if not name.startswith("_")]
    of_module = [name for name, one in inspect.getmembers(keys, inspect.isfunction) if one.__module__ == keys.__name__]
    no_keys = {"stream", "group", "outbox", "prefix", "followed", "_tagged"}  # what keys are made of
    made = [name for name in (*of_classes, *of_module) if name not in no_keys]
    assert len(first_cells(reference.keys_page())) == 1 + len(made), "the stream itself, and a key for each"


def test_every_finding_is_told(reference: ModuleType) -> None:
    assert first_cells(reference.findings_page()) == CHECKS.keys()


def test_the_site_is_built_and_its_links_lead_somewhere(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="pip install -e '.[docs]'; the workflow builds it")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "reference" / "settings.html").exists()
