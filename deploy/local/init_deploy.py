"""``usher init-deploy``: write a folder from which supervisord, or systemd through it, runs Usher on one host.

What the files say is in the templates of deploy/init, one section per program: the engineer on call reads what runs,
not how it was computed.
"""

from __future__ import annotations

import os
import pwd
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

import click
import jinja2
import psutil

from usher.common.base.durations import option
from usher.common.base.errors import SettingsError, StartRefused
from usher.common.http.credentials import Role, line_of
from usher.common.redis.acl import USERS, acl_file
from usher.common.redis.embedded import SERVER_VARIABLE, find_redis_server, memory_of_machine, version_below_7
from usher.common.redis.locate import write_whole
from usher.common.runtime.own_command import usher_command
from usher.common.runtime.settings import PREFIX, CommonSettings, is_loopback, load
from usher.deploy.local.up import EXAMPLE_HANDLER, LocalSettings, can_prove, problems_of_programs

DEPLOY = Path(__file__).resolve().parents[1]
ROLES = ("redis", "master", "consumer")
_ALL = "all"
_REDIS_PORT = 6390
#: From the first master's port to that of the first consumer.
_TO_CONSUMERS = 21
#: Settings given for each program in its section, or by this command's flags.
_NOT_SHARED = frozenset(
    PREFIX + name for name in ("BIND", "ADVERTISE_URL", "CONSUMER_NAME", "CONSUMERS", "MASTERS", "STATE_DIR")
)
#: Settings that name files, which programs look for from other folders than this one.
_PATHS = ("USHER_TLS_CERT", "USHER_TLS_KEY", "USHER_TLS_CA", "USHER_TOKENS_FILE")
#: The user of Redis for masters and operators' commands.
_MASTER = "master"
#: Variables of usher.env: the URL of Redis of each user of its ACL file; tokens, with role and name in the tokens file.
_REDIS_URLS = {user: "USHER_REDIS_URL" if user == _MASTER else f"REDIS_URL_{user.upper()}" for user in USERS}
_TOKENS = {
    "TOKEN_OPERATOR": (Role.OPERATOR, "operator"),
    "TOKEN_VIEWER": (Role.VIEWER, "viewer"),
    "TOKEN_CONSUMER": (Role.CONSUMER, "*"),
}
#: Files with secrets, and the role whose programs read them.
_SECRET = {
    "usher.env": "",
    "redis.conf": "redis",
    "users.acl": "redis",
    "tokens": "master",
    "master.env": "master",
    "consumer.env": "consumer",
    "auditor.env": "master",
}
#: Longest path in bytes: a socket below it must fit into 108 bytes, with what supervisord adds to its name.
_LONGEST_FOLDER = 70
#: Characters that mean something to a shell, systemd or supervisord.
_ODD = re.compile(r"[\s'\"\\%;#$`]")

_HELP = """Write a folder that runs Usher on this host: supervisord.conf, settings and secrets, systemd unit, runbook.

Settings are taken from the environment (USHER_*), and stand in usher.env afterwards. Secrets that are not set are made.
USHER_MASTER_URLS names the masters if they run on several hosts, USHER_PORT the port of the first master (8700; the
consumers have those from 21 higher on), USHER_REDIS_PORT that of Redis (6390).
Where the handler cannot be used yet, the folder is written all the same, and the exit code is 1.
Given by root, and with users usher-redis, usher-master and usher-consumer on this machine, each role runs as its own.

\b
  usher init-deploy /srv/usher --handler shop.orders:handle            everything on one host
  set -a; . /srv/usher/usher.env; set +a                               on another host, with a copy of that file:
  usher init-deploy /srv/usher --role consumer --host 10.0.0.3         more consumers
"""


class Host:
    """A host and its programs. ``settings``: of usher.env, secrets included. ``masters``, ``consumers``: URLs of
    those that run here, by name. ``users``: of the machine, by role; empty: all run as who gives the command.
    ``project``: where consumers run; None: in ``folder``."""

    def __init__(
        self, folder: Path, asked: Sequence[str], host: str, consumers: int, handler: str, environ: Mapping[str, str]
    ) -> None:
        """Find out what will run. Raises StartRefused or SettingsError naming the setting or flag."""
        self.folder, self.address = folder, host.strip("[]")
        _check_place(folder, self.address)
        given = {name: value for name, value in environ.items() if value and name.startswith(PREFIX)}
        self.settings = settings = {name: value for name, value in given.items() if name not in _NOT_SHARED}
        settings |= {name: str(Path(settings[name]).expanduser().absolute()) for name in _PATHS if name in settings}
        local = load(LocalSettings, settings)
        self.drain_seconds, self.stop_seconds = local.drain_seconds, local.stop_seconds
        at, self.scheme = f"[{self.address}]" if ":" in self.address else self.address, _scheme(settings)
        redis_at = f"{at}:{local.redis_port or _REDIS_PORT}"
        self.roles = _roles(asked, settings.get("USHER_REDIS_URL", ""), redis_at)
        settings |= {"USHER_STATE_DIR": str(folder / "state"), "USHER_HANDLER": handler}
        paths = [str(Path(part).absolute()) for part in environ.get("PYTHONPATH", "").split(os.pathsep) if part]
        if paths:
            settings["PYTHONPATH"] = os.pathsep.join(paths)  # programs run in another folder
        if "redis" in self.roles:  # no older server reads its files: a restored backup needs the same one
            settings[SERVER_VARIABLE] = str(find_redis_server(settings.get(SERVER_VARIABLE, "")))
        if "master" in self.roles:
            urls = [f"{self.scheme}://{at}:{port}" for port in (local.port, local.port + 1)]
            settings.setdefault("USHER_MASTER_URLS", ",".join(urls))
            if not is_loopback(f"{at}:1") and "USHER_HEALTH_HOSTS" not in settings:
                if "consumer" not in self.roles:
                    raise StartRefused(
                        "USHER_HEALTH_HOSTS is not set: name the consumers' hosts or network: 10.0.0.0/24"
                    )
                settings["USHER_HEALTH_HOSTS"] = f"127.0.0.1,::1,{self.address}"
        settings |= _secrets(folder, self.roles, redis_at, settings, environ)
        _check(settings, self.roles)
        self.users = _users(self.roles)
        self.masters = _own_masters(settings, self.address) if "master" in self.roles else {}
        prefix = "consumer" if at == "127.0.0.1" else re.sub(r"[^A-Za-z0-9.-]", "-", self.address).strip("-")
        numbers = range(consumers if "consumer" in self.roles else 0)
        first = local.port + _TO_CONSUMERS
        self.consumers = {f"{prefix}-{one + 1}": f"{self.scheme}://{at}:{first + one}" for one in numbers}
        self.project = _project_of(handler, paths) if numbers else None

    def again(self) -> str:
        words = ["usher", "init-deploy", str(self.folder), "--force", "--host", self.address]
        words += [word for role in self.roles for word in ("--role", role)]
        words += ["--consumers", str(len(self.consumers))] if self.consumers else []
        return ("" if self.project is None else f"cd {self.project} && ") + shlex.join(words)

    def settings_of(self, role: str) -> dict[str, str]:
        """Return the settings of a role's programs: a handler, and whoever breaks into one, sees no secret of
        others."""
        own = {name: value for name, value in self.settings.items() if not name.startswith(("TOKEN_", "REDIS_URL_"))}
        if role == "consumer":
            own.pop("USHER_TOKENS_FILE", None)
            own["USHER_API_TOKEN"] = self.settings.get("TOKEN_CONSUMER", own["USHER_API_TOKEN"])
        if role != "master":
            own["USHER_REDIS_URL"] = self.settings.get(f"REDIS_URL_{role.upper()}", own["USHER_REDIS_URL"])
        if role == "auditor":  # in the folder of people's `usher audit`, and without any token
            own = {name: value for name, value in own.items() if name not in ("USHER_TOKENS_FILE", "USHER_API_TOKEN")}
            return own | dict.fromkeys(("USHER_STATE_DIR", "USHER_AUDIT_DIR"), str(self.folder / "state" / "audit"))
        return own | {"USHER_STATE_DIR": str(self.folder / "state" / role)}

    def files(self) -> dict[str, str]:
        facts = vars(self) | {
            "again": self.again(),
            "audits": bool(self.masters) and can_prove(),
            "consumer_folder": self.project or self.folder,
            "maxmemory": memory_of_machine() // 2,
            "programs": [*(["redis"] if "redis" in self.roles else []), *self.masters, *self.consumers],
            "python": sys.executable,
            "redis": urlsplit(self.settings["USHER_REDIS_URL"]),
            "user": psutil.Process().username(),
            "usher": usher_command(),
        }
        environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(DEPLOY), undefined=jinja2.StrictUndefined, keep_trailing_newline=True
        )
        # supervisord expands words with a per cent sign
        environment.filters["words"] = lambda words: shlex.join(map(str, words)).replace("%", "%%")

        def render(name: str, **more: object) -> str:
            return environment.get_template(f"init/{name}.j2").render(facts | more)

        names = ("usher.env", "supervisord.conf", "usher.service", "start", "as", "README.md")
        made = {name: render(name) for name in names}
        made |= {name: (DEPLOY / name).read_text("utf-8") for name in ("runbook.md", "alerts.yml", "grafana.json")}
        for role in {"master", "consumer", *(["auditor"] if facts["audits"] else [])} & {"auditor", *self.roles}:
            made[f"{role}.env"] = render("role.env", role=role, settings=self.settings_of(role))
        if "TOKEN_OPERATOR" in self.settings:
            made["tokens"] = self._tokens()
        if "redis" in self.roles:
            made |= {"redis.conf": render("redis.conf"), "users.acl": self._users_acl()}
        return made

    def _tokens(self) -> str:
        made = [line_of(role, name, self.settings[variable]) for variable, (role, name) in _TOKENS.items()]
        file, ours = self.folder / "tokens", [line.split()[:2] for line in made]
        former = file.read_text("utf-8").splitlines() if file.is_file() else []
        return "\n".join([*made, *(line for line in former if line.split()[:2] not in ours)]) + "\n"

    def _users_acl(self) -> str:
        settings = load(CommonSettings, self.settings)
        sources = settings.sources
        fed = () if sources is None else (*sources.names, *sources.patterns)
        passwords = {user: _password(self.settings[variable]) for user, variable in _REDIS_URLS.items()}
        selectors = version_below_7(Path(self.settings[SERVER_VARIABLE])) is None
        return acl_file(settings.work_stream, settings.group, fed, passwords, selectors=selectors)


@click.command(help=_HELP)
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--role",
    "roles",
    type=click.Choice([_ALL, *ROLES]),
    multiple=True,
    default=(_ALL,),
    help="What runs here; may be given twice. [all]",
)
@option("--host", "Address of this host, at which its programs listen and others reach them.", default="127.0.0.1")
@option("--consumers", "Consumers on this host.", click.IntRange(1, 200), 2)
@option("--handler", "What they run, as module:function.", default=EXAMPLE_HANDLER, envvar="USHER_HANDLER")
@option(
    "--force",
    "Overwrite files that are there, with what usher.env says in the environment. state/ is never touched.",
    is_flag=True,
)
def init_deploy(folder: Path, roles: tuple[str, ...], host: str, consumers: int, handler: str, force: bool) -> None:
    made = Host(folder.absolute(), roles, host, consumers, handler, os.environ)
    files, with_settings = made.files(), f"set -a; . {made.folder / 'usher.env'}; set +a"
    there = [name for name in files if (made.folder / name).exists()]
    if there and not force:
        raise StartRefused(
            f"{made.folder} has {', '.join(there)} already; choose another folder, or --force to overwrite"
        )
    if "usher.env" in there and not os.environ.get("USHER_API_TOKEN"):
        raise StartRefused(
            f"{made.folder / 'usher.env'} has settings and secrets that are not in the environment, and --force would"
            f" lose them; in a shell:  {with_settings}   (or remove the file, and all secrets are made anew)"
        )
    write(made, files)
    if not made.users and (os.geteuid() == 0 or ("consumer" in made.roles and len(made.roles) > 1)):
        click.echo(
            f"All programs run as {'root' if os.geteuid() == 0 else 'one user'}, so handlers can read usher.env."
            " Written by root, each role has a user of its own, once there are some:  for role in redis master"
            " consumer; do useradd --system --no-create-home --shell /usr/sbin/nologin usher-$role; done"
        )
    click.echo(f"Start it: {made.folder}/start    More: {made.folder}/README.md")
    if made.project is not None:
        click.echo(f"Consumers run in {made.project}, where the module of their handler is.")
    if "consumer" in made.roles and (trouble := _handler_trouble(made)):
        click.echo(
            f"usher: no consumer will start: {trouble}\n'The handler' in {made.folder / 'README.md'} says where it is"
            f" looked for. Once that is mended: {with_settings}; {made.again()}",
            err=True,
        )
        sys.exit(1)


def _check(settings: dict[str, str], roles: Sequence[str]) -> None:
    if roles == ["consumer"]:
        settings.pop("USHER_TOKENS_FILE", None)
    missing = [name for name in ("USHER_REDIS_URL", "USHER_API_TOKEN", "USHER_MASTER_URLS") if not settings.get(name)]
    if missing and roles != ["redis"]:
        raise StartRefused(
            f"{', '.join(missing)} not set, which all hosts share: copy the consumer.env of another one here (for a"
            " master its usher.env), and in a shell:  set -a; . ./consumer.env; set +a"
        )
    if odd := [name for name, value in settings.items() if {*"'\n\r"} & {*value}]:
        raise SettingsError([f"{name} has a quote or a line break, which cannot stand in usher.env" for name in odd])
    if problems := problems_of_programs(settings):
        raise SettingsError(problems)


def _project_of(handler: str, paths: Sequence[str]) -> Path | None:
    """Return this folder if the handler's module is here. Consumers then run in it, as in `usher up`; it is no part of
    PYTHONPATH, which comes before Python's own modules: a project's queue.py would break every program."""
    module, here = handler.partition(":")[0].partition(".")[0], Path.cwd()
    is_here = module != "usher" and any((here / name).exists() for name in (module, f"{module}.py"))
    return here if is_here and not _ODD.search(str(here)) and str(here) not in paths else None


def _check_place(folder: Path, address: str) -> None:
    fits = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]*|([A-Fa-f0-9]*:){2,}[A-Fa-f0-9.]*", address)  # no port behind a name
    if not fits or address in ("0.0.0.0", "::"):  # noqa: S104
        raise StartRefused(f"--host {address!r}: name an address, or a name, by which others can reach this host")
    if len(os.fsencode(folder)) > _LONGEST_FOLDER or _ODD.search(str(folder)):
        raise StartRefused(
            f"{folder}: choose a path of at most {_LONGEST_FOLDER} bytes without spaces, quotes or any of \\ % ; # $ `"
        )


def write(host: Host, files: Mapping[str, str]) -> None:
    """Write the files, each whole or not at all, secrets never readable for others; and make the state folder."""
    state = host.folder / "state"
    try:
        for made in (host.folder, state, *(state / name for name in ("logs", "audit", *host.roles))):
            made.mkdir(mode=0o755 if made == host.folder else 0o700, parents=True, exist_ok=True)
            _give(made, host.users.get("master" if made.name == "audit" else made.name))
        state.chmod(0o711 if host.users else 0o700)  # each user goes through it to its own
        for name, text in files.items():
            mode = 0o600 if name in _SECRET else 0o755 if name in ("start", "as") else 0o644
            user = host.users.get(_SECRET.get(name, ""))
            write_whole(host.folder / name, text, mode, partial(_give, user=user))
    except OSError as problem:
        raise StartRefused(f"{host.folder} cannot be written: {problem}") from problem


def _give(path: Path, user: str | None) -> None:
    if user:
        shutil.chown(path, user, pwd.getpwnam(user).pw_gid)


def _handler_trouble(host: Host) -> str:
    """Return why consumers cannot use their handler; "" when they can. Checked when the folder is written: a host may
    be prepared before the handler's project is on it."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith((PREFIX, "PYTHONPATH"))}
    with tempfile.TemporaryFile() as said:  # no pipe: what the module has started may hold it open
        words, environ = usher_command("preflight"), plain | host.settings_of("consumer")
        at = host.project or host.folder
        code = subprocess.run(words, env=environ, cwd=at, stdout=said, stderr=said, check=False).returncode
        said.seek(0)
        return said.read().decode(errors="replace").strip().removeprefix("usher: ") if code else ""


def _roles(asked: Sequence[str], redis_url: str, redis_at: str) -> list[str]:
    is_ours = not redis_url or re.match(rf"rediss?://{_MASTER}:[^@]*@{re.escape(redis_at)}/0", redis_url) is not None
    if "redis" in asked and not is_ours:
        raise StartRefused(f"--role redis: USHER_REDIS_URL names another Redis than that at {redis_at}; unset it")
    return [role for role in ROLES if role in asked or (_ALL in asked and (role != "redis" or is_ours))]


def _secrets(
    folder: Path, roles: Sequence[str], redis_at: str, settings: Mapping[str, str], environ: Mapping[str, str]
) -> dict[str, str]:
    """Return tokens and URLs of Redis: those in the environment, else new ones for a Redis and a tokens file of our
    own. A host with consumers alone gets only theirs."""
    known = {name: environ.get(name, "") for name in ("USHER_API_TOKEN", *_TOKENS, *_REDIS_URLS.values())}
    if roles == ["consumer"]:
        url, token = known["REDIS_URL_CONSUMER"], known["TOKEN_CONSUMER"]
        return {
            "USHER_REDIS_URL": url or known["USHER_REDIS_URL"],
            "USHER_API_TOKEN": token or known["USHER_API_TOKEN"],
        }
    made = {variable: url for variable in _REDIS_URLS.values() if (url := known[variable])}
    if "redis" in roles:
        # TLS, if programs speak it and others can reach this Redis.
        tls = _scheme(settings) == "https" and not is_loopback(redis_at)
        ca = f"?ssl_ca_certs={quote(settings['USHER_TLS_CA'])}" if tls and "USHER_TLS_CA" in settings else ""
        for user, variable in _REDIS_URLS.items():
            password = quote(_password(known[variable]) or secrets.token_urlsafe(32), safe="")
            made[variable] = f"{'rediss' if tls else 'redis'}://{user}:{password}@{redis_at}/0{ca}"
    names, file = ["USHER_API_TOKEN"], str(folder / "tokens")
    if settings.get("USHER_TOKENS_FILE", file) == file:
        names += _TOKENS
        made["USHER_TOKENS_FILE"] = file
    return made | {name: known[name] or secrets.token_urlsafe(32) for name in names}


def _password(url: str) -> str:
    return unquote(urlsplit(url).password or "")


def _own_masters(settings: Mapping[str, str], address: str) -> dict[str, str]:
    urls, scheme = [url.strip().rstrip("/") for url in settings["USHER_MASTER_URLS"].split(",")], _scheme(settings)
    own = [
        url for url in urls if (parts := urlsplit(url)).hostname == address and parts.scheme == scheme and parts.port
    ]
    if not own:
        raise StartRefused(
            f"USHER_MASTER_URLS: {', '.join(urls)} cannot run on --host {address}: name them {scheme}:// with that"
            " address and a port"
        )
    return {f"master-{number}": url for number, url in enumerate(own, 1)}


def _scheme(settings: Mapping[str, str]) -> str:
    return "https" if settings.get("USHER_TLS_CERT") else "http"


def _users(roles: Sequence[str]) -> dict[str, str]:
    users = {role: f"usher-{role}" for role in roles}
    try:
        return users if os.geteuid() == 0 and all(map(pwd.getpwnam, users.values())) else {}
    except KeyError:
        return {}
