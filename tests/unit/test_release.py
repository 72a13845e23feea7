"""What a release says about itself is said once, or says the same everywhere."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import yaml

import usher
from tests.rules import ROOT

_PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_version_is_in_pyproject_only() -> None:
    assert usher.__version__ == importlib.metadata.version("usher-streams") == _PROJECT["version"]
    assert "__version__" not in usher.__all__
    others = [
        file.name
        for folder in ("usher", "common", "master", "consumer", "deploy")
        for file in (ROOT / folder).rglob("*.py")
        if re.search(rf"[\"']{re.escape(_PROJECT['version'])}[\"']", file.read_text())
    ]
    assert others == []


def test_the_changelog_has_the_parts_of_keep_a_changelog() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## \[([^\]]+)\](?: - (\d{4}-\d{2}-\d{2}))?$", text, re.MULTILINE)
    assert versions[0] == ("Unreleased", "")
    assert all(date for _, date in versions[1:])
    parts = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security", "Before you upgrade"}
    assert set(re.findall(r"^### (.+)$", text, re.MULTILINE)) <= parts


def test_ci_runs_what_a_change_must_pass_on_every_python_that_is_claimed() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    pythons = jobs["test"]["strategy"]["matrix"]["python"]
    assert "PYTHON=python bash .ci/run" in [step.get("run") for step in jobs["test"]["steps"]]
    claimed = [
        found[1]
        for one in _PROJECT["classifiers"]
        if (found := re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", one))
    ]
    assert pythons == claimed == [f"3.{minor}" for minor in range(11, 11 + len(pythons))]
    assert _PROJECT["requires-python"] == f">={pythons[0]}"


def test_extras_of_the_documents_exist_and_all_has_all_of_them() -> None:
    extras = _PROJECT["optional-dependencies"]
    [everything] = extras["all"]
    assert set(re.findall(r"\w+", everything.partition("[")[2])) == extras.keys() - {"all"}
    for document in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")):
        for named in re.findall(r"pip install [^`\n]*?\.\[([\w,]+)\]", document.read_text()):
            assert set(named.split(",")) <= extras.keys(), document


def test_usher_in_a_zip_as_clusters_get_it_has_its_scripts_and_statements(tmp_path: Path) -> None:
    zipped = tmp_path / "usher.zip"
    ask = (
        "from usher.common.redis import scripts; from usher.common.outbox.rows import queries;"
        " print(scripts.__file__, len(scripts.source('look_again')), len(queries('sqlite')))"
    )
    subprocess.run([sys.executable, "-m", "zipfile", "-c", zipped, "usher"], cwd=ROOT, check=True)
    environ = os.environ | {"PYTHONPATH": str(zipped)}
    done = subprocess.run(
        [sys.executable, "-c", ask], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    file, *lengths = done.stdout.split()
    assert file.startswith(str(zipped))
    assert all(int(one) > 0 for one in lengths)
