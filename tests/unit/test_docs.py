"""What the documents say exists: links and their headings, commands and their flags, settings; and Python in them is
Python."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from usher.cli import LazyGroup

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted((*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "deploy" / "runbook.md"))


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


def command_lines(text: str) -> Iterator[list[str]]:
    """The words of every ``usher ...`` that a reader may copy, in blocks and between backticks."""
    for line in [line for block in blocks(text, "sh") for line in block.splitlines()] + re.findall(
        r"`([^`\n]+)`", without_blocks(text)
    ):
        for part in re.split(r"&&|;| \| |\s#\s", line):
            words = part.strip()
            if match := re.match(r"(?:sudo |[A-Z_]+=\S+ )*usher (.+)", words):
                try:
                    yield shlex.split(match[1].replace("...", ""), comments=True)
                except ValueError:
                    continue  # a sentence with an apostrophe


def wrong(words: list[str]) -> str | None:
    """What is wrong with a command line, if anything is."""
    command: click.Command = LazyGroup("usher")
    for at, word in enumerate(words):
        if isinstance(command, click.Group) and not word.startswith(("-", "<", "[")):
            found = command.get_command(click.Context(command), word)
            if found is None and not command.invoke_without_command:
                return f"no command {word!r} in {words}" if "|" not in word and word != "X" else None
            command = found or command
        elif word.startswith("--") and word != "--":
            flags = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
            if word.partition("=")[0] not in flags | {"--help", "--version"}:
                return f"no flag {word!r} in {words[:at]}"
    return None


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_links_lead_somewhere(document: Path) -> None:
    lost = []
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", without_blocks(document.read_text())):
        path = (document.parent / target).resolve() if target else document
        if not path.exists() or (anchor and anchor not in anchors(path)):
            lost.append(f"{target}#{anchor}")
    assert lost == []


@pytest.mark.parametrize("document", [one for one in DOCUMENTS if one.name != "CHANGELOG.md"], ids=named)
def test_commands_and_their_flags_exist(document: Path) -> None:
    assert [problem for words in command_lines(document.read_text()) if (problem := wrong(words))] == []


def test_a_command_or_flag_that_does_not_exist_is_noticed() -> None:
    text = (
        "```sh\nusher frobnicate 1   # no\nUSHER_X=1 usher up --sideways\n```\nand `usher dead list --errors x`, `usher"
        " tickets explain 42`"
    )
    assert len([words for words in command_lines(text) if wrong(words)]) == 3


def test_settings_exist() -> None:
    known = set(re.findall(r"USHER_[A-Z_]+", (ROOT / "deploy" / "env.example").read_text()))
    told = {
        (name, named(one)) for one in DOCUMENTS for name in re.findall(r"(?<!_)USHER_[A-Z_]*[A-Z]", one.read_text())
    }
    assert sorted((name, where) for name, where in told if name not in known) == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_python_is_python(document: Path) -> None:
    for block in blocks(document.read_text(), "python"):
        ast.parse(block)
