"""What the documents name exists: links and their headings, paths, commands and their flags, settings, public names;
and Python in them is Python."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import usher
from benchmarks.cli.main import benchmarks
from examples.rides.cli import rides
from tests.rules import FUNCTION_LINES, ROOMS, ROOT
from usher import cli
from usher.cli import LazyGroup

DOCUMENTS = sorted((*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "deploy" / "runbook.md"))
#: The changelog names what there was.
CURRENT = [document for document in DOCUMENTS if document.name != "CHANGELOG.md"]
PROGRAMS: dict[str, click.Command] = {
    "usher": LazyGroup("usher"),
    "python -m benchmarks": benchmarks,
    "python -m examples.rides": rides,
}
_FOLDERS = "common|master|consumer|deploy|usher|benchmarks|examples|tests|docs"


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(path: Path) -> set[str]:
    """As GitHub makes them: small letters, no punctuation, a hyphen for each space."""
    headings = re.findall(r"^#+ (.+)$", without_blocks(path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.replace("`", "")).strip().lower().replace(" ", "-") for heading in headings}


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def spans(text: str) -> list[str]:
    """Return what stands between backticks, also over the end of a line."""
    found = [span for block in without_blocks(text).split("\n\n") for span in re.findall(r"`([^`]+)`", block)]
    return [span.replace("\n", " ") for span in found]


def command_lines(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the program and the words of every command that a reader may copy, in blocks and between backticks."""
    of_blocks = [line for block in blocks(text, "sh") for line in block.splitlines()]
    for line in of_blocks + spans(text):
        for part in re.split(r"&&|;| \| |\s#\s", line):
            called = re.match(
                rf"(?:sudo |[A-Z_]+=\S+ )*({'|'.join(map(re.escape, PROGRAMS))})(?: (.+))?$", part.strip()
            )
            if called:
                try:
                    yield called[1], shlex.split((called[2] or "").replace("...", ""), comments=True)
                except ValueError:
                    continue  # a sentence with an apostrophe


def wrong(program: str, words: list[str]) -> str | None:
    """Say what is wrong with a command line, if anything is."""
    command = PROGRAMS[program]
    for at, word in enumerate(words):
        if isinstance(command, click.Group) and not word.startswith(("-", "<", "[")):
            found = command.get_command(click.Context(command), word)
            if found is None and not command.invoke_without_command:
                is_placeholder = "|" in word or word.isupper()
                return None if is_placeholder else f"no command {word!r} in {program} {words}"
            command = found or command
        elif word.startswith("--") and word != "--":
            flags = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
            shared = {*cli.usher.share()} if program == "usher" else set()
            if word.partition("=")[0] not in flags | shared | {"--help", "--version"}:
                return f"no flag {word!r} in {program} {words[:at]}"
    return None


def paths(text: str) -> set[str]:
    """Find the paths within the project that a text names, in and outside of blocks; of a pattern its folder."""
    return set(re.findall(rf"(?<![\w/.~{{}}-])(?:{_FOLDERS})/[\w./-]*\w(?![\w*])", text))


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_links_lead_somewhere(document: Path) -> None:
    lost = []
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", without_blocks(document.read_text())):
        path = (document.parent / target).resolve() if target else document
        if not path.exists() or (anchor and anchor not in anchors(path)):
            lost.append(f"{target}#{anchor}")
    assert lost == []


@pytest.mark.parametrize("document", CURRENT, ids=named)
def test_commands_and_their_flags_exist(document: Path) -> None:
    assert [problem for line in command_lines(document.read_text()) if (problem := wrong(*line))] == []


def test_a_command_or_flag_that_does_not_exist_is_noticed() -> None:
    text = (
        "```sh\nusher frobnicate 1   # no\nUSHER_X=1 usher up --sideways\n```\nand `usher dead list --errors x`, `usher"
        " tickets explain 42`, `python -m benchmarks hot --rate-of-one`, `python -m benchmarks\nhot --warm`,\n"
        "`python -m benchmarks tepid`, `python -m benchmarks NAME`, `python -m examples.rides --rides 100 --miles 3`"
    )
    found = [problem for line in command_lines(text) if (problem := wrong(*line))]
    assert [problem.split(" in ")[0] for problem in found] == [
        "no command 'frobnicate'",
        "no flag '--sideways'",
        "no flag '--errors'",
        "no flag '--warm'",
        "no command 'tepid'",
        "no flag '--miles'",
    ]


@pytest.mark.parametrize("document", CURRENT, ids=named)
def test_paths_exist(document: Path) -> None:
    rooms_of_one_file = {room for room in ROOMS if not (ROOT / room).is_dir()}
    found = paths(document.read_text()) - rooms_of_one_file
    assert sorted(path for path in found if not (ROOT / path).exists()) == []


def test_a_path_is_found_wherever_it_stands() -> None:
    text = "`common/nowhere.py`, [it](../deploy/runbook.md), /srv/usher/start, `master/web/*.py`\n```\ntests/no/where\n```\n"
    assert paths(text) == {"common/nowhere.py", "tests/no/where", "master/web"}


def test_the_architecture_lists_every_room_in_its_order() -> None:
    listed = re.findall(r"^\| `([\w/]+)` \|", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)
    assert tuple(listed) == ROOMS


def test_the_limits_are_those_that_hold() -> None:
    assert f"A function has at most {FUNCTION_LINES} lines" in (ROOT / "CONTRIBUTING.md").read_text()


@pytest.mark.parametrize("document", CURRENT, ids=named)
def test_names_of_the_package_exist(document: Path) -> None:
    """``usher.Producer``, and modules by their whole name."""
    lost = []
    for name in re.findall(r"`usher\.([A-Z]\w+|(?:common|master|consumer|deploy)[\w.]*)", document.read_text()):
        try:
            _ = getattr(usher, name) if name[0].isupper() else importlib.import_module(f"usher.{name}")
        except (AttributeError, ModuleNotFoundError):
            lost.append(name)
    assert lost == []


def test_settings_exist() -> None:
    known = set(re.findall(r"USHER_[A-Z_]+", (ROOT / "deploy" / "env.example").read_text()))
    known |= set(re.findall(r"\$\{(USHER_[A-Z_]+)", (ROOT / "deploy" / "container" / "compose.yaml").read_text()))
    told = {(name, named(one)) for one in CURRENT for name in re.findall(r"(?<!_)USHER_[A-Z_]*[A-Z]", one.read_text())}
    assert sorted((name, where) for name, where in told if name not in known) == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_python_is_python(document: Path) -> None:
    for block in blocks(document.read_text(), "python"):
        imported = [node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.ImportFrom)]
        names = {alias.name for node in imported if node.module == "usher" for alias in node.names}
        assert document.name == "CHANGELOG.md" or names <= {*usher.__all__}


def test_what_is_to_run_every_night_does() -> None:
    nightly = re.findall(r"^(pytest .*\S) +# every night", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert nightly
    assert "schedule:" in workflow
    assert [line for line in nightly if f"- run: {line}\n" not in workflow] == []
