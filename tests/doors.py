"""Doormen for tests of applications, and token files for tests of programs."""

from __future__ import annotations

from pathlib import Path

from usher.common.http.auth import Doorman
from usher.common.http.credentials import Credentials, Identity, Role, line_of


def doorman(token: str = "", **others: Identity) -> Doorman:
    """One who asks for ``token`` (all rights), or for one of ``others``: token -> identity. Without any he asks
    nobody."""
    return Doorman(Credentials(token, others=others))


def tokens_file(folder: Path, *tokens: tuple[Role, str, str], signed_on: str = "") -> str:
    """Write a tokens file with (role, name, token) each, and lines of people; return its path."""
    file = folder / "tokens"
    file.touch(0o600)
    file.write_text("".join(f"{line_of(*one)}\n" for one in tokens) + signed_on)
    return str(file)
