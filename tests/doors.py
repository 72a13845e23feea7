"""Doormen for tests of applications."""

from __future__ import annotations

from usher.common.http.auth import Doorman
from usher.common.http.credentials import Credentials, Identity, Role


def doorman(token: str = "", **others: Identity) -> Doorman:
    """One who asks for ``token`` (all rights), or for one of ``others``: token -> identity. Without any he asks
    nobody."""
    return Doorman(Credentials({token: Identity(Role.ALL, "api-token"), **others}))
