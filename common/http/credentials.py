"""Credentials for HTTP: roles, tokens, and the file that holds tokens.

A token is a secret text, sent as ``Authorization: Bearer <token>``. It stands for an identity:

=========  =============================================================  ====================================
role       rights                                                         token
=========  =============================================================  ====================================
viewer     look (GET), nothing else                                       ``USHER_VIEWER_TOKEN``, or the file
operator   look, and act: redrive, drop, pause, drain                     ``USHER_OPERATOR_TOKEN``, or the file
consumer   register, report and deregister under its own name             the file; ``USHER_CONSUMER_TOKEN``: any name
all        all of these, under any name                                   ``USHER_API_TOKEN``
=========  =============================================================  ====================================

``USHER_TOKENS_FILE`` has a line per token, ``role name sha256-of-the-token`` (``usher token new`` makes one); ``#``
begins a comment. The name is the one in the action log; for a consumer it is the consumer's name, or the beginning of
its name followed by ``*``. Only the owner may have rights on the file (mode 0600). It is read again when it has
changed; a new version that cannot be used changes nothing and is reported in the log.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import logging
import os
import re
import secrets
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from usher.common.base.clock import now_s
from usher.common.base.errors import SettingsError, StartRefused
from usher.common.base.log import event
from usher.common.runtime.file_watch import FileWatch
from usher.common.runtime.settings import is_loopback

log = logging.getLogger(__name__)

#: Random bytes in a token that we make.
_TOKEN_BYTES = 32
_LARGEST_FILE = 4 * 1024 * 1024
#: Shortest time between two looks at the file.
_LOOK_S = 1.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}\*?")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Role(enum.StrEnum):
    """The role of a caller, or the role that a route requires. Routes that need no token require ``ANYBODY``."""

    ANYBODY = "anybody"
    VIEWER = "viewer"
    OPERATOR = "operator"
    CONSUMER = "consumer"
    ALL = "all"

    def may(self, needed: Role) -> bool:
        """Return True if this role is enough for a route that requires ``needed``.

        >>> Role.OPERATOR.may(Role.VIEWER), Role.VIEWER.may(Role.OPERATOR), Role.OPERATOR.may(Role.CONSUMER)
        (True, False, False)
        """
        return needed is Role.ANYBODY or self in (Role.ALL, needed) or (self is Role.OPERATOR and needed is Role.VIEWER)


#: Roles that a token of the file may have.
FILE_ROLES = (Role.VIEWER, Role.OPERATOR, Role.CONSUMER)


@dataclass(frozen=True)
class Identity:
    """A caller whose token is known."""

    role: Role
    name: str

    def is_for(self, consumer: str) -> bool:
        """Return True if this identity may speak for the consumer of that name.

        >>> Identity(Role.CONSUMER, "shop-*").is_for("shop-3"), Identity(Role.CONSUMER, "a").is_for("b")
        (True, False)
        >>> Identity(Role.OPERATOR, "a").is_for("a")
        False
        """
        if self.role is not Role.CONSUMER:
            return self.role is Role.ALL
        return consumer.startswith(self.name[:-1]) if self.name.endswith("*") else consumer == self.name


#: The caller of a service without tokens: on loopback only, or where the operator insists.
NOBODY_ASKED = Identity(Role.ALL, "anybody")
#: A caller without a known token.
STRANGER = Identity(Role.ANYBODY, "anybody")


class Credentials:
    """The tokens that a program accepts. Called from several threads.

    Tokens are looked up by a keyed hash (``seal``), so that the time of a look-up tells nothing about a token or its
    line in the file. The key also signs cookies: it is the same on all masters with the same ``USHER_*_TOKEN``; without
    any of these it is new at every start.
    """

    def __init__(self, fixed: Mapping[str, Identity], file: Path | None = None) -> None:
        """Read the file. ``fixed``: token -> identity; empty tokens are left out. Raises SettingsError when the file
        cannot be used."""
        tokens = {token: identity for token, identity in fixed.items() if token}
        self.key = _key_of(tokens)
        self._fixed = {self.seal(digest_of(token)): identity for token, identity in tokens.items()}
        self._file = file
        self._lock = threading.Lock()  # held by the thread that reads the file again
        self._looked_s = now_s()
        self._files = FileWatch(*([file] if file is not None else []))
        self._known = self._fixed if file is None else self._fixed | self._read(file)

    @property
    def asked(self) -> bool:
        """True if tokens are required at all: a token is configured, or a file, even a file without tokens."""
        return bool(self._fixed) or self._file is not None

    def seal(self, digest: str) -> str:
        """Return the seal that stands for a token in memory and in cookies; the hash alone is not enough to make it."""
        return hmac.new(self.key, digest.encode(), "sha256").hexdigest()

    def find(self, token: str) -> Identity | None:
        """Return the identity of a token; None if it is unknown."""
        return self.find_sealed(self.seal(digest_of(token)))

    def find_sealed(self, seal: str) -> Identity | None:
        """Return the identity of the token that the seal stands for; None if it is unknown."""
        self._look()
        return self._known.get(seal)

    def _read(self, file: Path) -> dict[str, Identity]:
        return {self.seal(digest): identity for digest, identity in read_tokens_file(file).items()}

    def _look(self) -> None:
        """Read the file again if it has changed."""
        if self._file is None or now_s() - self._looked_s < _LOOK_S or not self._lock.acquire(blocking=False):
            return
        try:
            self._looked_s = now_s()
            if self._files.are_new():
                self._known = self._fixed | self._read(self._file)
                event(log, "tokens_reloaded", tokens=len(self._known))
        except SettingsError as unfit:
            self._files.failed()
            event(
                log,
                "tokens_file_unusable",
                level=logging.ERROR,
                problems=list(unfit.problems),
                means="the former tokens stay in use",
            )
        finally:
            self._lock.release()


def _key_of(tokens: Iterable[str]) -> bytes:
    """Derive the key from the tokens, slowly, so that no user can find a weak token from their own cookie."""
    secret = "\0".join(sorted(tokens))
    return (
        hashlib.scrypt(secret.encode(), salt=b"usher", n=2**14, r=8, p=1, dklen=32)
        if secret
        else secrets.token_bytes(32)
    )


def fixed_tokens(given: Mapping[str, tuple[str, Identity]]) -> dict[str, Identity]:
    """Convert setting -> (token, identity) to token -> identity. Raises SettingsError for a token that two settings
    share."""
    found: dict[str, Identity] = {}
    for setting, (token, identity) in given.items():
        if token and token in found:
            raise SettingsError([f"{setting}: the same token is also set for another role; choose another one"])
        found[token] = identity
    return found


#: Characters of the shortest token that a program takes which other machines can reach: as many guesses as are heard
#: in years must not find one.
SHORTEST_TOKEN = 16


def reach_problems(
    bind: str, asked: bool, insecure: bool, tokens: Mapping[str, str] = MappingProxyType({})
) -> list[str]:
    """Return what is wrong with the tokens if others can reach the address and no token is required, or one that is
    easily guessed (``tokens``, by their settings), unless ``insecure`` insists."""
    if insecure or is_loopback(bind):
        return []
    found = [
        f"{setting}: a token of {len(token)} characters can be guessed, and other machines can reach {bind}; set one"
        f" of at least {SHORTEST_TOKEN} (`usher token new` makes one; to do without: --insecure true)"
        for setting, token in tokens.items()
        if 0 < len(token) < SHORTEST_TOKEN
    ]
    if not asked:
        found.append(
            f"USHER_API_TOKEN must be set to listen on {bind}, which other machines can reach (to do without:"
            " --insecure true)"
        )
    return found


def check_reach(bind: str, asked: bool, insecure: bool, tokens: Mapping[str, str] = MappingProxyType({})) -> None:
    """Raise StartRefused with all of ``reach_problems``."""
    if problems := reach_problems(bind, asked, insecure, tokens):
        raise StartRefused("; ".join(problems))


def digest_of(token: str) -> str:
    """Return the hash of a token as the file holds it. A token is long and random, so a fast hash is enough."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


def new_token() -> str:
    """Return a new, unguessable token, of characters that need no quoting."""
    return "usher_" + secrets.token_urlsafe(_TOKEN_BYTES)


def line_of(role: Role, name: str, token: str) -> str:
    """Return the file's line for a token. Raises ValueError for a name that the file cannot hold."""
    if not _NAME.fullmatch(name) or (name.endswith("*") and role is not Role.CONSUMER):
        raise ValueError(
            "a name is 1 to 64 of A-Z a-z 0-9 . _ @ - and begins with a letter or digit; a consumer's name may end"
            " with *"
        )
    return f"{role.value} {name} {digest_of(token)}"


def read_tokens_file(file: Path) -> dict[str, Identity]:
    """Read the file as hash -> identity. Raises SettingsError, which names every bad line by its number and repeats
    nothing of it."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as opened:
            mode = os.fstat(descriptor).st_mode
            if mode & 0o077:
                raise SettingsError(
                    [f"USHER_TOKENS_FILE: others may read or write {file} (mode {mode & 0o777:04o}); chmod 600 it"]
                )
            text = opened.read(_LARGEST_FILE + 1).decode("utf-8", "replace")
    except OSError as problem:
        raise SettingsError([f"USHER_TOKENS_FILE: {file} cannot be read: {problem.strerror}"]) from None
    if len(text) > _LARGEST_FILE:
        raise SettingsError([f"USHER_TOKENS_FILE: {file} is larger than {_LARGEST_FILE} bytes"])
    found: dict[str, Identity] = {}
    problems = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        identity = _identity(words)
        if identity is None or words[2] in found:
            wrong = (
                "is not `role name sha256` (see `usher token new`)"
                if identity is None
                else "repeats the token of an earlier line"
            )
            problems.append(f"USHER_TOKENS_FILE: line {number} of {file} {wrong}")
        else:
            found[words[2]] = identity
    if problems:
        raise SettingsError(problems)
    return found


def _identity(words: list[str]) -> Identity | None:
    if len(words) != 3 or words[0] not in {role.value for role in FILE_ROLES}:
        return None
    role, name, digest = Role(words[0]), words[1], words[2]
    fits = _NAME.fullmatch(name) and _DIGEST.fullmatch(digest) and (role is Role.CONSUMER or not name.endswith("*"))
    return Identity(role, name) if fits else None
