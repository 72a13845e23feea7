"""The folder that runs Usher on one host: its programs, their settings, and the files that say so. Rendering only;
nothing is written.

Everything is spelled out, one section per program: the engineer on call reads what runs, not how it was computed.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

import jinja2

from usher.common.base.errors import StartRefused
from usher.common.http.credentials import Role, line_of
from usher.common.redis.acl import acl_file
from usher.common.redis.embedded import SERVER_VARIABLE
from usher.common.runtime.memory import memory_of_machine
from usher.common.runtime.own_command import usher_command
from usher.common.runtime.settings import CommonSettings, is_loopback, load

DEPLOY = Path(__file__).resolve().parents[1]
ROLES = ("redis", "master", "consumer")
#: The user of Redis for masters and operators' commands.
MASTER = "master"
#: Seconds that the programs need around the drain, in addition to it; more than ``usher.common.http.serve``
#: takes (8 s).
AROUND_DRAIN_S = 12
_OTHERS_STOP_S = 20
_SECRET, _PLAIN, _RUN = 0o600, 0o644, 0o755
#: Variable of usher.env with the URL of Redis for a user of its ACL file; masters and operators' commands use
#: USHER_REDIS_URL.
REDIS_URL_OF = "REDIS_URL_{}"
#: Variable of usher.env with the token of a role; and the roles, with the names that the tokens file has for them.
TOKEN_OF = "TOKEN_{}"
TOKENS = ((Role.OPERATOR, "operator"), (Role.VIEWER, "viewer"), (Role.CONSUMER, "*"))
#: Files that are copied unchanged.
_COPIES = ("runbook.md", "alerts.yml", "grafana.json")


@dataclass(frozen=True)
class SupervisedProgram:
    group: str
    name: str
    command: str
    priority: int
    stop_seconds: int
    user: str = ""
    directory: str = ""


@dataclass(frozen=True)
class Host:
    """A host and its programs. ``master_urls``: of the whole system; those whose host is ``address`` run here.

    ``settings``: of all programs, by their environment names, secrets included. ``redis_url`` is one of them, for the
    redis-server here. ``redis_users``: URLs of Redis by the names of its users, without that of masters; empty where
    all use one URL. ``project``: where consumers run; None: in ``folder``. ``users``: of the machine, by role; those of
    several roles differ where root wrote the folder. ``acl_has_selectors``: the redis-server here is 7 or later.
    """

    folder: Path
    roles: Sequence[str]
    address: str
    master_urls: Sequence[str]
    consumers: int
    consumer_prefix: str
    health_port: int
    drain_seconds: float
    settings: Mapping[str, str]
    redis_users: Mapping[str, str] = field(default_factory=dict)
    project: Path | None = None
    users: Mapping[str, str] = field(default_factory=dict)
    acl_has_selectors: bool = True

    @property
    def own_users(self) -> Mapping[str, str]:
        """The users of the machine by role, if they differ; else none."""
        return self.users if len(set(self.users.values())) > 1 else {}

    @property
    def state(self) -> Path:
        return self.folder / "state"

    @property
    def consumer_folder(self) -> Path:
        return self.project or self.folder

    @property
    def redis_url(self) -> str:
        return self.settings["USHER_REDIS_URL"]

    @property
    def scheme(self) -> str:
        return scheme_of(self.settings)

    @property
    def consumer_stop_seconds(self) -> int:
        return int(self.drain_seconds) + AROUND_DRAIN_S

    def own_masters(self) -> list[str]:
        """Return the URLs of the masters that run here. Raises StartRefused when there are none."""
        own = [url for url in self.master_urls if urlsplit(url).hostname == self.address]
        if not own:
            raise StartRefused(
                f"--masters: none of {', '.join(self.master_urls)} is on --host {self.address}; one must be, to run"
                " here"
            )
        if self.scheme == "https" and any(urlsplit(url).scheme != "https" for url in own):
            raise StartRefused(
                f"--masters: with USHER_TLS_CERT the masters on --host {self.address} speak HTTPS only: name them"
                " https://"
            )
        return own

    def programs(self) -> list[SupervisedProgram]:
        made = []
        if "redis" in self.roles:
            server = _words(self.settings[SERVER_VARIABLE])
            made.append(self._program("redis", "redis", f"{server} %(here)s/redis.conf", 10, _OTHERS_STOP_S))
        if "master" in self.roles:
            for number, url in enumerate(self.own_masters(), 1):
                bind = _bind(self.address, urlsplit(url).port or 80)
                command = _as("master", "master", "--bind", bind, "--advertise-url", url)
                made.append(self._program("master", f"master-{number}", command, 20, _OTHERS_STOP_S))
        if "consumer" in self.roles:
            for number in range(1, self.consumers + 1):
                bind = _bind(self.address, self.health_port + number - 1)
                name, url = f"{self.consumer_prefix}-{number}", f"{self.scheme}://{bind}"
                words = ("consumer", "--consumer-name", name, "--bind", bind, "--advertise-url", url)
                made.append(self._program("consumer", name, _as("consumer", *words), 30, self.consumer_stop_seconds))
        return made

    def _program(self, role: str, name: str, command: str, priority: int, stop_seconds: int) -> SupervisedProgram:
        where = str(self.project) if role == "consumer" and self.project is not None else ""
        return SupervisedProgram(role, name, command, priority, stop_seconds, self.own_users.get(role, ""), where)

    def settings_of(self, role: str) -> dict[str, str]:
        """Return the settings of a role's programs: a handler, and whoever breaks into one, sees no secret of
        others."""
        own = {name: value for name, value in self.settings.items() if not name.startswith("TOKEN_")}
        if role == "consumer":
            own.pop("USHER_TOKENS_FILE", None)
            own["USHER_API_TOKEN"] = self.settings.get("TOKEN_CONSUMER") or self.settings["USHER_API_TOKEN"]
            own["USHER_REDIS_URL"] = self.redis_users.get(role, self.redis_url)
        return own | {"USHER_STATE_DIR": str(self.state / role)}

    def files(self) -> dict[str, tuple[str, int]]:
        """Return text and mode of every file, by its name. Raises StartRefused."""
        programs = self.programs()
        facts = self._facts(programs)
        made = {
            "usher.env": (_render("usher.env", facts), _SECRET),
            "supervisord.conf": (_render("supervisord.conf", facts), _PLAIN),
            "usher.service": (
                _render("usher.service", facts | {"folder": str(self.folder).replace("%", "%%")}),
                _PLAIN,
            ),
            "start": (_render("start", facts), _RUN),
            "as": (_render("as", facts), _RUN),
            "README.md": (_render("README.md", facts), _PLAIN),
        }
        for role in {"master", "consumer"} & {*self.roles}:
            own = {"role": role, "settings": sorted(self.settings_of(role).items())}
            made[f"{role}.env"] = (_render("role.env", own), _SECRET)
        made |= {name: ((DEPLOY / name).read_text("utf-8"), _PLAIN) for name in _COPIES if (DEPLOY / name).is_file()}
        if "TOKEN_OPERATOR" in self.settings:
            made["tokens"] = (self._tokens(), _SECRET)
        if "redis" in self.roles:
            made["redis.conf"] = (self._redis_conf(), _SECRET)
            made["users.acl"] = (self._users_acl(), _SECRET)
        return made

    def _tokens(self) -> str:
        """Return our lines of the tokens file, and those that people have added to a former one."""
        made = [line_of(role, name, self.settings[TOKEN_OF.format(role.upper())]) for role, name in TOKENS]
        file, ours = self.folder / "tokens", [line.split()[:2] for line in made]
        former = file.read_text("utf-8").splitlines() if file.is_file() else []
        return "\n".join([*made, *(line for line in former if line.split()[:2] not in ours)]) + "\n"

    def again(self) -> str:
        """Return the command that writes this folder again, without the settings in usher.env."""
        words = ["usher", "init-deploy", str(self.folder), "--force"]
        words += [word for role in self.roles for word in ("--role", role)] + ["--host", self.address]
        if "consumer" in self.roles:
            words += ["--consumers", str(self.consumers), "--health-port", str(self.health_port)]
        if "redis" in self.roles:
            words += ["--redis-port", str(urlsplit(self.redis_url).port)]
        words += [word for role, user in self.users.items() for word in ("--user", f"{role}={user}")]
        return ("" if self.project is None else f"cd {self.project} && ") + shlex.join(words)

    def _facts(self, programs: Sequence[SupervisedProgram]) -> dict[str, object]:
        names = {group: [program.name for program in programs if program.group == group] for group in ROLES}
        groups = [
            (group, members, 10 + 10 * ROLES.index(group))
            for group, members in names.items()
            if members and members != [group]
        ]
        stop_seconds = self.consumer_stop_seconds * ("consumer" in self.roles) + 2 * _OTHERS_STOP_S + 10
        return {
            "roles": ", ".join(self.roles),
            "again": self.again(),
            "programs": programs,
            "groups": groups,
            "names": [program.name for program in programs],
            "consumers": names["consumer"],
            "settings": sorted(self.settings.items()),
            "redis_users": {REDIS_URL_OF.format(name.upper()): url for name, url in self.redis_users.items()},
            "folder": self.folder,
            "supervisord": _words(sys.executable, "-m", "supervisor.supervisord", escape=False),
            "user": next(iter(self.users.values()), ""),
            "users": self.own_users,
            "stop_seconds": stop_seconds,
            "consumer_stop_seconds": self.consumer_stop_seconds,
            "drain_seconds": f"{self.drain_seconds:g}",
            "has_redis": "redis" in self.roles,
            "scheme": self.scheme,
            "host": self.address,
            "redis_port": urlsplit(self.redis_url).port,
            "redis_ca": self.settings.get("USHER_TLS_CA") if self.redis_url.startswith("rediss") else None,
            "consumer_folder": self.consumer_folder,
            "python": sys.executable,
            "handler": self.settings.get("USHER_HANDLER", "shop.orders:handle"),
        }

    def _redis_conf(self) -> str:
        port = urlsplit(self.redis_url).port
        lines = [
            f'dir "{self.state / "redis"}"',
            f"bind {self.address}",
            *self._listening(port),
            f"maxmemory {memory_of_machine() // 2}",
            f'aclfile "{self.folder / "users.acl"}"',
        ]
        return (DEPLOY / "redis.conf").read_text("utf-8") + "\n# ---- this host ----\n\n" + "\n".join(lines) + "\n"

    def _listening(self, port: int | None) -> list[str]:
        if urlsplit(self.redis_url).scheme != "rediss":
            return [f"port {port}"]
        cert, key = self.settings["USHER_TLS_CERT"], self.settings.get("USHER_TLS_KEY", "")
        lines = ["port 0", f"tls-port {port}", f'tls-cert-file "{cert}"', f'tls-key-file "{key or cert}"']
        return [*lines, f'tls-ca-cert-file "{self.settings.get("USHER_TLS_CA") or cert}"', "tls-auth-clients no"]

    def _users_acl(self) -> str:
        settings = load(CommonSettings, self.settings)
        sources = settings.sources
        urls = {MASTER: self.redis_url, **self.redis_users}
        passwords = {name: unquote(urlsplit(url).password or "") for name, url in urls.items()}
        fed = () if sources is None else (*sources.names, *sources.patterns)
        return acl_file(settings.work_stream, settings.group, fed, passwords, selectors=self.acl_has_selectors)


def scheme_of(settings: Mapping[str, str]) -> str:
    return "https" if settings.get("USHER_TLS_CERT") else "http"


def own_redis_url(user: str, address: str, port: int, password: str, settings: Mapping[str, str]) -> str:
    """Return the URL of the Redis that runs here, for one of its users; over TLS, if programs speak it and others can
    reach this Redis."""
    where = f"{user}:{quote(password, safe='')}@{_bind(address, port)}/0"
    if scheme_of(settings) == "http" or is_loopback(_bind(address, port)):
        return f"redis://{where}"
    ca = settings.get("USHER_TLS_CA", "")
    return f"rediss://{where}{f'?ssl_ca_certs={quote(ca)}' if ca else ''}"


def _as(role: str, *words: str) -> str:
    return f"%(here)s/as {role} {_words(*usher_command(), *words)}"


def _bind(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _words(*words: str, escape: bool = True) -> str:
    """Return a command line; supervisord expands words with a per cent sign, so it is escaped."""
    line = shlex.join(words)
    return line.replace("%", "%%") if escape else line


def _render(name: str, facts: Mapping[str, object]) -> str:
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False)
    return environment.from_string((DEPLOY / "init" / f"{name}.j2").read_text("utf-8")).render(facts)
