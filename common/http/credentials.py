"""Decide who may do what over HTTP: one table of tokens, and of names that a proxy signs on, each with a role.

``USHER_API_TOKEN`` has the role all. ``USHER_TOKENS_FILE`` has a line for each other token (docs/security.md). Only the
owner may have rights on the file (mode 0600; of a file that is another's the group may read it). It is read again when
it has changed; a new version that cannot be used changes nothing and is reported in the log.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import hmac
import ipaddress
import math
import os
import re
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from usher.common.base.clock import now_s
from usher.common.base.errors import SettingsError, StartRefused
from usher.common.base.log import ERROR, event
from usher.common.runtime.settings import is_loopback

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
T = TypeVar("T")
_LARGEST_FILE = 4 * 1024 * 1024
#: Shortest time between two looks at the file.
_LOOK_S = 1.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}\*?")
_DIGEST = re.compile(r"[0-9a-f]{64}")
#: In place of a token's hash; and before a name that a proxy gives, which so is never that of a token.
_SIGN_ON, MARK = "sign-on", "sign-on:"
#: A name that a proxy may give: visible ASCII but the comma, with which a header that came twice is joined.
PERSON = re.compile(r"[!-+\--~]{1,128}")
#: Characters of the shortest token that a program takes which other machines can reach: as many guesses as are heard
#: in years must not find one.
SHORTEST_TOKEN = 16


#: Seconds until a failed read is repeated although nothing has changed: the fault may have been ours, with no file
#: descriptor left.
_AGAIN_S = 60.0


class Role(enum.StrEnum):
    """The role of a caller, or the role that a route requires. Routes that need no token require ``ANYBODY``."""

    ANYBODY = "anybody"
    VIEWER = "viewer"
    OPERATOR = "operator"
    CONSUMER = "consumer"
    PRODUCER = "producer"
    ALL = "all"

    def may(self, needed: Role) -> bool:
        """Return True if this role is enough for a route that requires ``needed``.

        >>> Role.OPERATOR.may(Role.VIEWER), Role.VIEWER.may(Role.OPERATOR), Role.OPERATOR.may(Role.CONSUMER)
        (True, False, False)
        """
        is_of_operators = self is Role.OPERATOR and needed in (Role.VIEWER, Role.PRODUCER)
        return needed is Role.ANYBODY or self in (Role.ALL, needed) or is_of_operators


#: Roles that a token of the file may have.
FILE_ROLES = (Role.VIEWER, Role.OPERATOR, Role.CONSUMER, Role.PRODUCER, Role.ALL)


@dataclass(frozen=True)
class Identity:
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


#: The caller of a service without tokens, which is on loopback only.
NOBODY_ASKED = Identity(Role.ALL, "anybody")
#: A caller without a known token.
STRANGER = Identity(Role.ANYBODY, "anybody")


class FileValue(Generic[T]):
    """A value that ``make`` makes of files, looked at once in ``every_s``. New ones that cannot be used (SettingsError,
    OSError) change nothing. ``tell`` hears of them, and (None) that the value is new. Called from several threads."""

    def __init__(
        self,
        files: Sequence[Path],
        make: Callable[[], T],
        tell: Callable[[SettingsError | OSError | None], None],
        every_s: float = 0.0,
    ) -> None:
        """Make the value. Raises what ``make`` raises."""
        self._files, self._make, self._tell, self._every_s = files, make, tell, every_s
        self._lock = threading.Lock()  # held by the thread that looks
        self._seen, self._looked_s, self._again_s = self._look(), now_s(), math.inf
        self._value = make()

    def get(self) -> T:
        if now_s() - self._looked_s < self._every_s or not self._lock.acquire(blocking=False):
            return self._value
        try:
            self._looked_s, seen = now_s(), self._look()
            if seen != self._seen or now_s() >= self._again_s:
                self._seen, self._again_s = seen, math.inf
                self._value = self._make()
                self._tell(None)
        except (SettingsError, OSError) as unfit:
            self._again_s = now_s() + _AGAIN_S
            self._tell(unfit)
        finally:
            self._lock.release()
        return self._value

    def _look(self) -> list[tuple[int, ...]]:
        """Return values that change when a file does; the inode's time also changes with its owner or mode, which may
        make it readable at last."""
        seen = list[tuple[int, ...]]()
        for file in self._files:
            with contextlib.suppress(OSError):
                found = file.stat()
                seen.append((found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns))
        return seen


class Credentials:
    """The table of one program. Called from several threads.

    Tokens are looked up by a keyed hash (``seal``), so that the time of a look-up tells nothing about a token or its
    line in the file. The key also signs cookies: it is the same on all masters with the same ``USHER_API_TOKEN``;
    without that it is new at every start.
    """

    def __init__(
        self, api_token: str = "", file: Path | None = None, others: Mapping[str, Identity] | None = None
    ) -> None:
        """Read the file. ``others``: further tokens. Raises SettingsError when the file cannot be used."""
        # Slowly, so that nobody can find a weak token from what was made with it.
        slow = hashlib.scrypt(api_token.encode(), salt=b"usher", n=2**14, r=8, p=1, dklen=32) if api_token else b""
        self.key = slow or secrets.token_bytes(32)
        tokens = dict(others or {}) | ({api_token: Identity(Role.ALL, "api-token")} if api_token else {})
        self._fixed = {self.seal_token(token): identity for token, identity in tokens.items()}
        self._file = None if file is None else file.expanduser()
        #: Identities, by seal.
        self.known = FileValue([] if self._file is None else [self._file], self._read, self._told, _LOOK_S)

    @property
    def asked(self) -> bool:
        """True if tokens are required at all: a token is configured, or a file, even a file without tokens."""
        return bool(self._fixed) or self._file is not None

    @property
    def people(self) -> list[Identity]:
        return [identity for identity in self.known.get().values() if identity.name.startswith(MARK)]

    def seal(self, text: str) -> str:
        """Return what stands for a token's hash in memory and in cookies; the hash alone is not enough to make it."""
        return hmac.new(self.key, text.encode(), "sha256").hexdigest()

    def seal_token(self, token: str) -> str:
        return self.seal(digest_of(token))

    def person(self, name: str) -> Identity:
        """Return what somebody may do whom a proxy names: ``Role.ANYBODY`` who is not in the file."""
        known = self.known.get()
        found = known.get(self.seal(MARK + name)) or known.get(self.seal(f"{MARK}*"))
        return Identity(found.role if found is not None else Role.ANYBODY, MARK + name)

    def _read(self) -> dict[str, Identity]:
        listed = {} if self._file is None else read_tokens_file(self._file)
        return {self.seal(key): identity for key, identity in listed.items()} | self._fixed

    def _told(self, unfit: SettingsError | OSError | None) -> None:
        if unfit is None:
            event("tokens_reloaded", tokens=len(self.known.get()))
        else:
            problems, means = list(getattr(unfit, "problems", ())), "the former tokens stay in use"
            event("tokens_file_unusable", level=ERROR, problems=problems, means=means)


def reach_problems(bind: str, api_token: str, file: Path | None) -> list[str]:
    """Return what is wrong if others can reach the address, and need no token, or one that is easily guessed."""
    if is_loopback(bind):
        return []
    if 0 < len(api_token) < SHORTEST_TOKEN:
        return [
            f"USHER_API_TOKEN: a token of {len(api_token)} characters can be guessed, and other machines can reach"
            f" {bind}; set one of at least {SHORTEST_TOKEN} (`usher token new` makes one)"
        ]
    if api_token or file is not None:
        return []
    return [
        f"USHER_API_TOKEN or USHER_TOKENS_FILE must be set to listen on {bind}, which other machines can reach"
        " (`usher token new` makes a token)"
    ]


def check_reach(bind: str, api_token: str, file: Path | None) -> None:
    if problems := reach_problems(bind, api_token, file):
        raise StartRefused("; ".join(problems))


def parse_networks(value: str) -> tuple[Network, ...]:
    """Return addresses and networks, comma separated. Raises ValueError, also for a network of all addresses: whoever
    reaches the port could be anybody then.

    >>> parse_networks("10.0.0.5, fd00::/8")
    (IPv4Network('10.0.0.5/32'), IPv6Network('fd00::/8'))
    """
    try:
        found = tuple(ipaddress.ip_network(one.strip()) for one in value.split(",") if one.strip())
    except ValueError:
        found = ()
    if value and not found:
        raise ValueError("must be addresses and networks like 10.0.0.5,10.1.0.0/24, comma separated")
    if any(network.prefixlen == 0 for network in found):
        raise ValueError("must not be all addresses: whoever reaches the port could say that they are anybody")
    return found


def digest_of(token: str) -> str:
    """Return the hash of a token as the file holds it. A token is long and random, so a fast hash is enough."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


def new_token() -> str:
    return "usher_" + secrets.token_urlsafe(32)


def line_of(role: Role, name: str, token: str) -> str:
    """Return the file's line for a token. Raises ValueError for a name that the file cannot hold."""
    line = f"{role.value} {name} {digest_of(token)}"
    if _parse(line.split()) is None:
        raise ValueError(
            "a name is 1 to 64 of A-Z a-z 0-9 . _ @ - and begins with a letter or digit; a consumer's name may end"
            " with *, or be *: any"
        )
    return line


def read_tokens_file(file: Path) -> dict[str, Identity]:
    """Read the file: a token's hash, or a name with ``MARK`` before it -> identity. Raises SettingsError, which names
    every bad line by its number and repeats nothing of it."""
    try:
        with file.open("rb") as opened:
            status = os.fstat(opened.fileno())
            # A secret that Kubernetes mounts is its own, and for the group of the pod.
            mode, unfit = status.st_mode, 0o077 if status.st_uid == os.geteuid() else 0o037
            if mode & unfit:
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
        if not (words := line.partition("#")[0].split()):
            continue
        parsed = _parse(words)
        if parsed is None or parsed[0] in found:
            wrong = "is not `role name sha256` (see `usher token new`), or `role name sign-on`"
            wrong = wrong if parsed is None else "repeats the token, or the name, of an earlier line"
            problems.append(f"USHER_TOKENS_FILE: line {number} of {file} {wrong}")
        else:
            found[parsed[0]] = parsed[1]
    if problems:
        raise SettingsError(problems)
    return found


def _parse(words: list[str]) -> tuple[str, Identity] | None:
    if len(words) != 3 or words[0] not in FILE_ROLES:
        return None
    role, name, digest = Role(words[0]), words[1], words[2]
    if digest == _SIGN_ON:
        is_person = role in (Role.VIEWER, Role.OPERATOR) and PERSON.fullmatch(name)
        return (MARK + name, Identity(role, MARK + name)) if is_person else None
    is_name = (_NAME.fullmatch(name) or name == "*") and (role is Role.CONSUMER or not name.endswith("*"))
    return (digest, Identity(role, name)) if is_name and _DIGEST.fullmatch(digest) else None
