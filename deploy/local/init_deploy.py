"""``usher init-deploy``: write a folder from which supervisord, or systemd through it, runs Usher on one host."""

from __future__ import annotations

import getpass
import ipaddress
import os
import pwd
import re
import secrets
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import click

from usher.common.base.errors import SettingsError, StartRefused
from usher.common.redis.acl import USERS
from usher.common.redis.embedded import SERVER_VARIABLE, find_redis_server, has_selectors
from usher.common.runtime.settings import PREFIX, CommonSettings, is_loopback, load
from usher.deploy.local.deploy_folder import (
    MASTER,
    REDIS_URL_OF,
    ROLES,
    TOKEN_OF,
    TOKENS,
    Host,
    own_redis_url,
    scheme_of,
)
from usher.deploy.local.plan import EXAMPLE_HANDLER
from usher.deploy.local.preflight import PassesOn, check_programs

_ALL = "all"
#: Settings given for each program in its section, or by this command's flags.
_NOT_SHARED = frozenset(
    PREFIX + name
    for name in ["BIND", "ADVERTISE_URL", "CONSUMER_NAME", "CONSUMERS", "MASTERS", "PORT", "REDIS_PORT", "STATE_DIR"]
)
_TOKENS = ("USHER_API_TOKEN", *(TOKEN_OF.format(role.upper()) for role, _ in TOKENS))
#: Settings that name files, which programs look for from other folders than this one.
_FILES = ("USHER_TLS_CERT", "USHER_TLS_KEY", "USHER_TLS_CA", "USHER_TOKENS_FILE")
#: Files that the programs of one role read.
_OWNERS = {
    "redis.conf": "redis",
    "users.acl": "redis",
    "tokens": "master",
    "master.env": "master",
    "consumer.env": "consumer",
}
#: Longest path in bytes: a socket below it must fit into 108 bytes, with what supervisord adds to its name.
_LONGEST_FOLDER = 70
#: Characters that mean something to a shell, systemd or supervisord.
_ODD = re.compile(r"[\s'\"\\%;#$`]")

_HELP = """Write a folder that runs Usher on this host: supervisord.conf, settings and secrets, systemd unit, runbook.

Settings are taken from the environment (USHER_*), and stand in usher.env afterwards.
Secrets that are not set are made.
Where the handler cannot be used yet, the folder is written all the same, and the exit code is 1.

\b
  usher init-deploy /srv/usher --handler shop.orders:handle            everything on one host
  set -a; . /srv/usher/usher.env; set +a                               on another host, with a copy of that file:
  usher init-deploy /srv/usher --role consumer --host 10.0.0.3         more consumers
"""


@click.command(cls=PassesOn, help=_HELP)
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--role",
    "roles",
    type=click.Choice([_ALL, *ROLES]),
    multiple=True,
    default=(_ALL,),
    help="What runs here; may be given twice. [all]",
)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address of this host, at which its programs listen and others reach them.",
)
@click.option(
    "--masters",
    metavar="URL,URL",
    envvar="USHER_MASTER_URLS",
    help="All masters of the system. [two on this host, from port 8700]",
)
@click.option("--consumers", type=click.IntRange(1, 200), default=2, show_default=True, help="Consumers on this host.")
@click.option(
    "--handler",
    envvar="USHER_HANDLER",
    default=EXAMPLE_HANDLER,
    show_default=True,
    help="What they run, as module:function.",
)
@click.option(
    "--health-port",
    type=click.IntRange(1, 65_000),
    default=8721,
    show_default=True,
    help="Port of the first consumer; the others follow.",
)
@click.option(
    "--redis-port",
    type=click.IntRange(1, 65_535),
    default=6390,
    show_default=True,
    help="Port of the Redis on this host.",
)
@click.option(
    "--user",
    "users",
    metavar="[ROLE=]NAME",
    multiple=True,
    help="User of the machine that runs a role, or all of them. [for root: usher-ROLE, else you]",
)
@click.option(
    "--force",
    is_flag=True,
    help="Overwrite files that are there, with what usher.env says in the environment. state/ is never touched.",
)
def init_deploy(folder: Path, roles: tuple[str, ...], force: bool, **asked: Any) -> None:
    host = plan(folder.absolute(), roles, asked, os.environ)
    files = host.files()
    there = [name for name in files if (host.folder / name).exists()]
    if there and not force:
        raise StartRefused(
            f"{host.folder} has {', '.join(there)} already; choose another folder, or --force to overwrite"
        )
    _check_secrets(host.folder / "usher.env", os.environ)
    write(host, files)
    if not host.own_users and "consumer" in host.roles and len(host.roles) > 1:
        click.echo(
            f"All programs run as {host.users['consumer']}, so handlers can read usher.env; written by root, each role"
            " has a user of its own."
        )
    runs = ", ".join(program.name for program in host.programs())
    click.echo(f"{host.folder} runs {runs}.\nStart it: {host.folder}/start    More: {host.folder}/README.md")
    if "redis" in host.roles:
        server = host.settings[SERVER_VARIABLE]
        click.echo(
            f"Redis is {server}; another one: {SERVER_VARIABLE}=PATH, with --force. `usher doctor` says what is wrong"
            " with it."
        )
    if "consumer" in host.roles and not _tell_of_handler(host):
        sys.exit(1)


def plan(folder: Path, roles: tuple[str, ...], asked: Mapping[str, Any], environ: Mapping[str, str]) -> Host:
    """Return what will run, after all checks. Raises StartRefused or SettingsError naming the setting or flag."""
    settings = load(CommonSettings, {name: value for name, value in environ.items() if name != "USHER_STATE_DIR"})
    address = asked["host"].strip("[]")
    _check_folder(folder)
    _check_address(address)
    shared = {name: value for name, value in environ.items() if name.startswith(PREFIX) and name not in _NOT_SHARED}
    shared["USHER_STATE_DIR"] = str(folder / "state")
    shared["USHER_HANDLER"] = asked["handler"]
    chosen = _roles(roles, settings.redis_url, address, asked["redis_port"])
    urls = _masters(chosen, asked["masters"] or "", address, scheme_of(shared))
    shared["USHER_MASTER_URLS"] = ",".join(urls)
    shared |= {name: str(Path(shared[name]).expanduser().absolute()) for name in _FILES if shared.get(name)}
    shared["USHER_REDIS_URL"], users = _redis_urls(chosen, settings.redis_url, environ, address, asked, shared)
    shared |= _tokens(folder, chosen, environ)
    if urlsplit(shared["USHER_REDIS_URL"]).scheme == "rediss" and "redis" in chosen:
        _check_tls(find_redis_server(settings.redis_server))
    paths = filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))
    shared["PYTHONPATH"] = os.pathsep.join(str(Path(part).absolute()) for part in paths)  # we go to another folder
    _check_health_hosts(chosen, address, shared)
    if "redis" in chosen:  # no older server reads its files: a restored backup needs the same one
        shared[SERVER_VARIABLE] = str(find_redis_server(settings.redis_server))
    shared = {name: value for name, value in shared.items() if value}
    check_programs({**_plain_environ(), **{name: value for name, value in shared.items() if name != "USHER_HANDLER"}})
    drain_seconds = float(shared.get("USHER_DRAIN_SECONDS", 20))
    _check_quotes(shared | {REDIS_URL_OF.format(user.upper()): url for user, url in users.items()})
    prefix = "consumer" if address == "127.0.0.1" else re.sub(r"[^A-Za-z0-9.-]", "-", address).strip("-")
    project = _project(folder, shared) if "consumer" in chosen else None
    return Host(
        folder,
        chosen,
        address,
        urls,
        asked["consumers"],
        prefix,
        asked["health_port"],
        drain_seconds,
        shared,
        users,
        project,
        _users(chosen, asked["users"]),
        "redis" not in chosen or has_selectors(Path(shared[SERVER_VARIABLE])),
    )


def write(host: Host, files: Mapping[str, tuple[str, int]]) -> None:
    """Write the files, each whole or not at all, secrets never readable for others; and make the state folder."""
    try:
        for made in (host.folder, host.state, host.state / "logs", *(host.state / role for role in host.roles)):
            made.mkdir(mode=0o755 if made == host.folder else 0o700, parents=True, exist_ok=True)
            _give(made, host.own_users.get(made.name, ""))
        host.state.chmod(0o711 if host.own_users else 0o700)  # each user goes through it to its own
        for name, (text, mode) in files.items():
            draft = host.folder / f".{name}.new"
            draft.unlink(missing_ok=True)
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as file:
                file.write(text)
            _give(draft, host.own_users.get(_OWNERS.get(name, ""), ""))
            draft.replace(host.folder / name)
    except OSError as problem:
        raise StartRefused(f"{host.folder} cannot be written: {problem}") from problem


def _give(path: Path, user: str) -> None:
    """Give a file or folder to a user of the machine; "": to nobody else."""
    if user:
        entry = pwd.getpwnam(user)
        os.chown(path, entry.pw_uid, entry.pw_gid)


def _roles(asked: tuple[str, ...], redis_url: str, address: str, redis_port: int) -> list[str]:
    """Return the roles in the order in which they start. A Redis elsewhere is no role here."""
    url = urlsplit(redis_url)
    is_here = url.scheme in ("redis", "rediss") and url.hostname == address and url.port == redis_port
    is_ours = not redis_url or (is_here and url.username == MASTER)
    if "redis" in asked and not is_ours:
        ours = f"redis://{MASTER}:PASSWORD@{_in_url(address)}:{redis_port}/0 (--host, --redis-port)"
        raise StartRefused(f"--role redis: USHER_REDIS_URL names another Redis than {ours}; unset it")
    return [role for role in ROLES if role in asked or (_ALL in asked and (role != "redis" or is_ours))]


def _masters(roles: list[str], asked: str, address: str, scheme: str) -> list[str]:
    if asked:
        return [url.strip().rstrip("/") for url in asked.split(",")]
    if "consumer" in roles and "master" not in roles:
        told = "--masters (or USHER_MASTER_URLS) is not set: name the masters that these consumers work for"
        raise StartRefused(told)
    return [f"{scheme}://{_in_url(address)}:{port}" for port in (8700, 8701)]


def _redis_urls(
    roles: list[str],
    redis_url: str,
    environ: Mapping[str, str],
    address: str,
    asked: Mapping[str, Any],
    settings: Mapping[str, str],
) -> tuple[str, dict[str, str]]:
    """Return the programs' URL of Redis, and those of its other users: made for a new Redis, else as in the
    environment. A host with consumers alone gets only their own URL."""
    given = {user: url for user in USERS if (url := environ.get(REDIS_URL_OF.format(user.upper()), ""))}
    if roles == ["consumer"]:
        redis_url, given = given.get("consumer", redis_url), {}
    if "redis" in roles:
        former = {**given, MASTER: redis_url}
        passwords = {user: unquote(urlsplit(former.get(user, "")).password or "") for user in USERS}
        given = {
            user: own_redis_url(user, address, asked["redis_port"], known or secrets.token_urlsafe(32), settings)
            for user, known in passwords.items()
        }
        redis_url = given.pop(MASTER)
    if not redis_url:
        raise StartRefused("USHER_REDIS_URL is not set: set it to the Redis to use, or add --role redis")
    return redis_url, given


def _tokens(folder: Path, roles: list[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return tokens for programs, operators, viewers and consumers: those in the environment, else new ones, and the
    file that has their hashes, unless there is another one. A host with consumers alone gets only its own token."""
    given, file = {name: environ.get(name, "") for name in _TOKENS}, str(folder / "tokens")
    if roles != ["consumer"] and environ.get("USHER_TOKENS_FILE", file) != file:
        return {"USHER_API_TOKEN": given["USHER_API_TOKEN"] or secrets.token_urlsafe(32)}
    if roles != ["consumer"]:
        return {name: token or secrets.token_urlsafe(32) for name, token in given.items()} | {"USHER_TOKENS_FILE": file}
    if not given["USHER_API_TOKEN"]:
        raise StartRefused(
            "USHER_API_TOKEN is not set: consumers need that of the masters. In a shell:  set -a; ."
            " /path/to/their/consumer.env; set +a"
        )
    return {"USHER_API_TOKEN": given["TOKEN_CONSUMER"] or given["USHER_API_TOKEN"], "USHER_TOKENS_FILE": ""}


def _users(roles: list[str], asked: tuple[str, ...]) -> dict[str, str]:
    """Return the user of the machine for each role. Raises StartRefused: for root, nothing is chosen in silence."""
    named = {role or _ALL: user for role, _, user in (one.rpartition("=") for one in asked)}
    usual = {role: f"usher-{role}" for role in roles} if os.geteuid() == 0 else {role: _me() for role in roles}
    users = {role: named.get(role) or named.get(_ALL) or usual[role] for role in roles}
    missing = [user for user in dict.fromkeys(users.values()) if not _is_known(user)]
    if missing:
        made = "; ".join(f"useradd --system --no-create-home --shell /usr/sbin/nologin {user}" for user in missing)
        raise StartRefused(f"--user: this machine has no user {', '.join(missing)}; make them ({made}) or name others")
    if os.geteuid() != 0 and {*users.values()} != {_me()}:
        raise StartRefused(f"--user: only root can write a folder for other users than {_me()}")
    return users


def _me() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # without a name, as in some containers
        return str(os.getuid())


def _is_known(user: str) -> bool:
    try:
        return bool(pwd.getpwnam(user))
    except KeyError:
        return user == _me()


def _check_tls(server: Path) -> None:
    """Raise StartRefused unless the redis-server can speak TLS: it reads the setting before it finds it wrong."""
    told = subprocess.run(
        [server, "--tls-port", "nothing"], capture_output=True, text=True, check=False, timeout=10, cwd="/"
    )
    if "Bad directive" in told.stdout + told.stderr:
        raise StartRefused(
            f"--host: passwords and messages would go through the network as plain text, since {server} has no TLS;"
            f" set {SERVER_VARIABLE} to one that has, or USHER_REDIS_URL to a Redis with TLS (rediss://)"
        )


def _check_folder(folder: Path) -> None:
    if len(os.fsencode(folder)) > _LONGEST_FOLDER or _ODD.search(str(folder)):
        raise StartRefused(
            f"{folder}: choose a path of at most {_LONGEST_FOLDER} bytes without spaces, quotes or any of \\ % ; # $ `"
        )


def _check_address(address: str) -> None:
    try:
        if ipaddress.ip_address(address).is_unspecified:
            raise StartRefused(
                f"--host {address} is no address at which others can reach this host; name the one they use"
            )
    except ValueError:
        if not re.fullmatch(r"[A-Za-z0-9.-]+", address):
            raise StartRefused(f"--host {address!r} is neither an address nor a host name") from None


def _check_health_hosts(roles: list[str], address: str, shared: dict[str, str]) -> None:
    """Set or demand USHER_HEALTH_HOSTS: a master asks consumers only at these hosts; others could not register."""
    if "USHER_HEALTH_HOSTS" in shared or is_loopback(f"{_in_url(address)}:1"):
        return
    if "master" in roles and "consumer" not in roles:
        raise StartRefused(
            "USHER_HEALTH_HOSTS is not set: name the hosts or the network of the consumers, e.g."
            " USHER_HEALTH_HOSTS=10.0.0.0/24"
        )
    shared["USHER_HEALTH_HOSTS"] = f"127.0.0.1,::1,{address}"


def _project(folder: Path, settings: Mapping[str, str]) -> Path | None:
    """Return the current folder if it has the handler's module and consumers do not find it without that; else None.
    ``folder`` need not exist yet.

    It becomes the folder they run in, as in `usher up`, and not a part of PYTHONPATH, which comes before Python's own
    modules: a project's ``queue.py`` would break every program, also ``usher`` in a shell that has read usher.env.
    """
    here, module = Path.cwd(), settings.get("USHER_HANDLER", "").partition(":")[0].partition(".")[0]
    if not module or _ODD.search(str(here)) or not ((here / module).exists() or (here / f"{module}.py").exists()):
        return None
    return here if _handler_trouble(settings, folder if folder.is_dir() else Path("/")) else None


def _tell_of_handler(host: Host) -> bool:
    """Print where the handler runs or why it cannot be used; return True when consumers can use it. The folder is
    written in any case: a host may be prepared before the handler's project is on it."""
    if host.project is not None:
        click.echo(f"Consumers run in {host.project}, where the module of their handler is.")
    trouble = _handler_trouble(host.settings, host.consumer_folder)
    if trouble:
        where = f"'The handler' in {host.folder / 'README.md'} says where it is looked for"
        click.echo(
            f"usher: no consumer will start: {trouble}\n{where}. Once that is mended: {_with_settings(host.folder)};"
            f" {host.again()}",
            err=True,
        )
    return not trouble


def _handler_trouble(settings: Mapping[str, str], folder: Path) -> str:
    """Return why a consumer that runs in ``folder`` with only these settings cannot use its handler; "" when it can."""
    try:
        check_programs({**_plain_environ(), **settings}, folder)
    except StartRefused as unusable:
        return str(unusable)
    return ""


def _plain_environ() -> dict[str, str]:
    """Return our environment without the settings that programs read from usher.env alone."""
    return {name: value for name, value in os.environ.items() if not name.startswith(PREFIX) and name != "PYTHONPATH"}


def _check_secrets(there: Path, environ: Mapping[str, str]) -> None:
    """Raise StartRefused if writing ``there`` anew would replace secrets and settings that all hosts share."""
    if there.is_file() and "USHER_API_TOKEN='" in there.read_text("utf-8") and not environ.get("USHER_API_TOKEN"):
        do = f"in a shell:  {_with_settings(there.parent)}   (or remove the file, and all secrets are made anew)"
        raise StartRefused(
            f"{there} has settings and secrets that are not in the environment, and --force would lose them; {do}"
        )


def _with_settings(folder: Path) -> str:
    return f"set -a; . {folder / 'usher.env'}; set +a"


def _check_quotes(shared: Mapping[str, str]) -> None:
    """Refuse values that a shell and systemd read differently between single quotes, or supervisord between double
    ones."""
    odd = [
        name
        for name, value in shared.items()
        if set("'\n\r\\") & set(value) or ('"' in value and not name.startswith(PREFIX))
    ]
    if odd:
        told = "has a quote, a backslash or a line break, which cannot stand in usher.env"
        raise SettingsError([f"{name} {told}" for name in sorted(odd)])


def _in_url(address: str) -> str:
    return f"[{address}]" if ":" in address else address
