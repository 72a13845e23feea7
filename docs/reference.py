"""The reference pages, made of the code, and the hooks by which mkdocs takes them in (mkdocs.yml).

Nothing of it is checked in: ``mkdocs build`` makes it anew. ``python docs/reference.py settings`` prints one page.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import posixpath
import re
import sys
import textwrap
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
from pydantic.fields import FieldInfo

from usher.cli import PARTS, load_command, usher
from usher.common.http.auth import Doorman
from usher.common.http.credentials import Credentials
from usher.common.http.openapi import document
from usher.common.observability.metrics import DEAD_LETTER_REASONS, Metrics
from usher.common.protocol import keys
from usher.common.runtime.settings import CommonSettings, name_of
from usher.consumer.settings import ConsumerSettings
from usher.consumer.web import create_app as consumer_app
from usher.master.assembly.facing import create_app as master_app
from usher.master.audit.findings import CHECKS
from usher.master.audit.settings import AuditSettings
from usher.master.membership.consumer_http import parse_hosts
from usher.master.settings import MasterSettings, StreamerSettings

ROOT = Path(__file__).resolve().parents[1]

_SETTINGS = """\
# Settings

Settings are environment variables, or the flag of the same name: `USHER_LEASE_SECONDS` is `--lease-seconds`; a flag
wins. Tokens and secrets have no flag. A number is in the unit that its name says. A wrong value ends the start with
one message that names every bad setting.
"""
_COMMANDS = """\
# Commands

Exit codes are told [with the settings](../start.md#settings). [Settings](settings.md) that a command reads are
flags of it, too.
"""
_HTTP = """\
# HTTP API

Masters serve it, and as an OpenAPI document `GET /api/openapi.json`; consumers serve their health, their metrics
and `GET /api/tickets/{id}`, what they know of one ticket. Errors are problem documents (RFC 9457) with a request
id. The role is that of the token (`Authorization: Bearer ...`): [who may do what](../security.md). Any request may
get these, too:

"""
_METRICS = """\
# Metrics

`GET /metrics` of masters and consumers, and of streamers with `USHER_OUTBOX_BIND`. No label holds a ticket or a
message. [alerts.yml](../deploy/alerts.yml) and [grafana.json](../deploy/grafana.json) use them.
"""
_KEYS = """\
# Redis keys

`S` is the ticket stream (where several are gathered, the work stream `usher:{G}`), `G` the group:
`USHER_TICKET_STREAM`, `USHER_GROUP`. All keys of a stream share its hash tag, and so one node of a cluster. Those
*with PX* end by themselves. Which program may touch which is what `usher acl` prints.

"""
_FINDINGS = """\
# Findings of the audit

[`usher audit`](../audit.md) looks for them; what to do is in the [runbook](../deploy/runbook.md#audit). *bad*: the
promise was broken, or work is stuck. *warn*: allowed once, but look.

"""

# ---- settings ----

PROGRAMS: dict[str, type[CommonSettings]] = {
    "master": MasterSettings,
    "consumer": ConsumerSettings,
    "streamer": StreamerSettings,
    "audit": AuditSettings,
}
TEN = "redis_url ticket_stream group handler concurrency max_attempts handler_seconds dead_letter_policy lease_seconds"
TEN += " api_token"


def settings_page() -> str:
    """Tell every setting: the ten that matter, then all, by the program that reads them."""
    ten = [next(_row(field, cls) for cls in PROGRAMS.values() if field in cls.model_fields) for field in TEN.split()]
    text = _SETTINGS + "\n## The ten that matter\n\n" + _table("setting | default | ", ten)
    text += "\n## All programs\n\n" + _rows(CommonSettings, [])
    for name, cls in PROGRAMS.items():
        text += f"\n## {name.capitalize()}\n\n" + _rows(cls, CommonSettings.model_fields)
    return text


def _rows(cls: type[CommonSettings], told: Container[str]) -> str:
    return _table("setting | default | ", [_row(field, cls) for field in cls.model_fields if field not in told])


def _row(field: str, cls: type[CommonSettings]) -> tuple[str, ...]:
    info = cls.model_fields[field]
    shown = "must be set" if info.is_required() else _code(_default(info.default))
    return _code(name_of(field)), shown, f"{info.description}{_bounds(info)}"


def _default(value: Any) -> str:
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _bounds(info: FieldInfo) -> str:
    least = next((limit.ge for limit in info.metadata if getattr(limit, "ge", None) is not None), None)
    most = next((limit.le for limit in info.metadata if getattr(limit, "le", None) is not None), None)
    return "" if least is None or most is None else f" ({least:,} to {most:,})".replace(",", " ")


# ---- commands ----


def commands_page() -> str:
    """Tell every command with its options; settings that are flags too are only named."""
    shared = ", ".join(_code(name) for name, option in usher.share().items() if not option.hidden)
    text = f"{_COMMANDS}\nEvery command that reads settings takes {shared}, before it or behind it.\n"
    for part, commands in PARTS.items():
        text += f"\n## {part}\n"
        for name, listed in commands.items():
            text += "".join(_command(f"usher {name}", load_command(f"usher.{listed[0]}")))
    return text


def _command(name: str, command: click.Command) -> Iterator[str]:
    context = click.Context(command, info_name=name)
    arguments = " ".join(command.collect_usage_pieces(context))
    paragraphs = map(_paragraph, (command.help or "").split("\n\n"))
    yield f"\n### {name}\n\n```\n{name} {arguments}\n```\n\n" + "\n\n".join(paragraphs) + "\n"
    rows, settings = [], []
    for parameter in command.params:
        record = parameter.get_help_record(context)
        setting = re.search(r"\[(USHER_\w+)\]$", record[1]) if record else None
        if setting and setting[1].removeprefix("USHER_").lower() in _fields():
            settings.append(_code(setting[1]))
        elif record:
            rows.append((_code(record[0]), _escaped(record[1])))
    if rows:
        yield "\n" + _table("option | ", rows)
    if settings:
        yield f"\nSettings: {', '.join(settings)}.\n"
    if isinstance(command, click.Group):
        for inner in command.list_commands(context):
            below = command.get_command(context, inner)
            if below is not None and not below.hidden:
                yield from _command(f"{name} {inner}", below)


def _paragraph(text: str) -> str:
    """Return a paragraph of a help text; \\b marks one whose lines stay as they are."""
    if not text.startswith("\b"):
        return _escaped(re.sub(r"\s+", " ", text))
    lines = textwrap.dedent(text.removeprefix("\b").strip("\n"))
    return f"```\n{lines}\n```"


def _fields() -> set[str]:
    return {field for cls in PROGRAMS.values() for field in cls.model_fields}


# ---- HTTP ----


class _Nothing:
    """What an application is built around here: nobody calls it."""

    def __getattr__(self, name: str) -> _Nothing:
        return self

    def __call__(self, *_given: Any) -> _Nothing:
        return self


def http_page() -> str:
    """Tell every route of both programs, and the documents that they take and answer."""
    nothing: Any = _Nothing()
    doorman = Doorman(Credentials({}))
    master = master_app(
        nothing, doorman=doorman, health_hosts=parse_hosts("127.0.0.1"), parts=nothing, metrics=Metrics()
    )
    asked = SimpleNamespace(bind="", advertise_url="", hosts="", api_token="", tokens_file=None)
    program: Any = SimpleNamespace(settings=asked, health=nothing, facts=nothing, metrics=Metrics())
    consumer = consumer_app(program)
    text = _HTTP
    told = document(master, "")
    shared = told["components"]["responses"]
    text += _table("status | ", [(status, said["description"]) for status, said in shared.items()])
    text += "\n## Masters\n" + "".join(_routes(told, shared))
    text += "\n## Consumers\n" + "".join(_routes(document(consumer, ""), shared))
    text += "\n## Documents\n"
    for name, schema in told["components"]["schemas"].items():
        rows = [(_code(field), _shape(shape)) for field, shape in schema.get("properties", {}).items()]
        said = re.sub(r"\s+", " ", schema.get("description", ""))
        text += f"\n### {name.lstrip('_')}\n\n{_escaped(said)}\n\n" + _table("field | ", rows)
    return text


def _routes(told: dict[str, Any], shared: dict[str, Any]) -> Iterator[str]:
    for path, methods in told["paths"].items():
        for method, operation in methods.items():
            said = f"{_escaped(operation['summary'])} Role: {operation['x-role']}."
            yield f"\n### {method.upper()} `{path}`\n\n{said}\n\n"
            rows = [
                (f"{given['in']} `{given['name']}`", _shape(given["schema"]) + " " + given.get("description", ""))
                for given in operation.get("parameters", ())
            ]
            if "requestBody" in operation:
                rows.append(("body", _shape(_content(operation["requestBody"]))))
            for status, answer in operation["responses"].items():
                if "$ref" not in answer:
                    said = _escaped(answer["description"]) if answer["description"] != "done" else ""
                    shape = _shape(_content(answer)) if int(status) < 400 or not said else ""
                    rows.append((f"answer {status}", f"{said} {shape}".strip()))
            yield _table("part | ", rows)


def _content(holder: dict[str, Any]) -> dict[str, Any]:
    return next((one["schema"] for one in holder.get("content", {}).values()), {})


def _shape(schema: dict[str, Any]) -> str:
    """Say in a few words what a JSON schema allows."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2].lstrip("_")
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(map(_shape, schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        return ", ".join(_code(str(value)) for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {_shape(schema.get('items', {}))}"
    if schema.get("type") == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_shape(schema['additionalProperties'])}"
    if schema.get("type") == "object" and schema.get("properties"):
        return "; ".join(f"`{field}`: {_shape(inner)}" for field, inner in schema["properties"].items())
    return str(schema.get("type", "anything"))


# ---- metrics, keys, findings ----

_KINDS = {"gauge": "gauge", "gauges": "gauge", "counter": "counter", "counters": "counter", "histogram": "histogram"}


def metrics_page() -> str:
    """Tell every metric, as the calls that make them say."""
    text = _METRICS
    folders = {"Of every program": "common", "Of masters": "master/insight", "Of consumers": "consumer"}
    for title, folder in {**folders, "Of streamers": "master/streamer"}.items():
        text += f"\n## {title}\n\n" + _table("metric | kind | ", sorted(metrics(ROOT / folder)))
    return text + f"\nReasons of dead letters: {', '.join(map(_code, DEAD_LETTER_REASONS))}.\n"


def metrics(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Yield name, kind and text of the metrics that files of a folder make."""
    for file in sorted(folder.rglob("*.py")):
        module = "usher." + ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for scope in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(scope, ast.FunctionDef):
                yield from _made_in(scope, module)


def _made_in(function: ast.FunctionDef, module: str) -> Iterator[tuple[str, str, str]]:
    nodes = list(ast.walk(function))
    texts = [node for node in nodes if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)]

    def read(node: ast.expr, line: int) -> str:
        match node:
            case ast.Constant(value=value):
                return str(value)
            case ast.Name(id=name):
                assigned = [one for one in texts if ast.unparse(one.targets[0]) == name and one.lineno <= line]
                if not assigned:
                    return str(getattr(importlib.import_module(module), name))
                return read(max(assigned, key=lambda one: one.lineno).value, line)
            case ast.JoinedStr(values=parts):
                return "".join(read(part, line) for part in parts)
            case ast.FormattedValue(value=value):
                return read(value, line)
        raise LookupError(f"line {node.lineno}: the text of a metric is a constant, for its page: {ast.unparse(node)}")

    for node in nodes:
        match node:
            case ast.Call(func=ast.Name(id="Counter"), args=[ast.Constant(value=name), text, label, *_]):
                yield _code(f"{name}_total{{{ast.literal_eval(label)[0]}}}"), "counter", read(text, node.lineno)
            case ast.Call(func=ast.Name(id="Info"), args=[ast.Constant(value=name), text, *_]):
                yield _code(f"{name}_info"), "info", read(text, node.lineno)
            case ast.Call(func=ast.Name(id=maker), args=[ast.Constant(value=name), text, *rest]) if maker in _KINDS:
                label = f"{{{read(rest[0], node.lineno)}}}" if maker in ("gauges", "counters") else ""
                ending = "_total" if _KINDS[maker] == "counter" else ""
                yield _code(f"usher_{name}{ending}{label}"), _KINDS[maker], read(text, node.lineno)


def keys_page() -> str:
    """Tell every key in Redis, as ``common/protocol/keys.py`` names and describes it."""
    rows = [(_code(name), _escaped(said)) for name, said in redis_keys()]
    return _KEYS + _table("key | ", rows)


def redis_keys() -> Iterator[tuple[str, str]]:
    """Yield name and description of every key."""
    yield "S", "Stream: the messages. Written by producers, read by the group."
    for maker in (keys.LogKeys("S"), keys.Keys("S", "G")):
        for name, member in vars(type(maker)).items():
            said = re.sub(r"\s+", " ", inspect.getdoc(member) or "").replace("``", "`")
            if isinstance(member, (property, keys._Key)) and said and name != "prefix":
                yield getattr(maker, name), said
            elif inspect.isfunction(member) and said and not name.startswith("_") and name != "followed":
                yield getattr(maker, name)("INCARNATION"), said
    for key, made in ((keys.uid_key, keys.uid_key("S", b"UID")), (keys.waiting_key, keys.waiting_key("S", "G", b"T"))):
        yield made.decode(), re.sub(r"\s+", " ", (inspect.getdoc(key) or "").partition(">>>")[0])


def findings_page() -> str:
    """Tell every check of the audit."""
    rows = [
        (_code(check.name), check.severity, _escaped(check.rule), _escaped(f"{check.means} {check.repair}"))
        for check in CHECKS.values()
    ]
    return _FINDINGS + _table("finding | | rule | when it does not hold", rows)


# ---- text ----


def _table(head: str, rows: Iterable[tuple[str, ...]]) -> str:
    cells = [head.split("|"), ["---"] * (head.count("|") + 1)]
    cells += [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "".join(f"| {' | '.join(map(str.strip, row))} |\n" for row in cells) if len(cells) > 2 else ""


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _escaped(text: str) -> str:
    """Keep `<x>` and {placeholders} of a text literal, but not what stands between backticks."""
    parts = text.replace("``", "`").split("`")
    return "`".join(part if at % 2 else re.sub(r"[<*]", r"\\\g<0>", part) for at, part in enumerate(parts))


PAGES: dict[str, Callable[[], str]] = {
    "settings": settings_page,
    "commands": commands_page,
    "http": http_page,
    "metrics": metrics_page,
    "keys": keys_page,
    "findings": findings_page,
}

# ---- hooks of mkdocs ----

_LINK = re.compile(r"(\]\()(?!\w+:|#)([^)#\s]+)")


def beside() -> list[str]:
    """Return the files outside of docs/ that belong to the site: documents, and what documents link to."""
    documents = [*ROOT.glob("docs/*.md"), *ROOT.glob("*.md"), ROOT / "deploy" / "runbook.md"]
    linked = {
        posixpath.normpath(posixpath.join(posixpath.dirname(document.relative_to(ROOT).as_posix()), link))
        for document in documents
        for _, link in _LINK.findall(_without_blocks(document.read_text("utf-8")))
    }
    own = {document.relative_to(ROOT).as_posix() for document in documents}
    return sorted(name for name in linked | own if not name.startswith("docs/") and (ROOT / name).is_file())


def place_of(name: str) -> str:
    """Return the place on the site of a file of the repository."""
    return "index.md" if name == "README.md" else name.removeprefix("docs/")


def on_files(files: Any, config: Any) -> Any:
    """Add the reference pages, and the files beside docs/."""
    from mkdocs.structure.files import File

    for name, page in PAGES.items():
        files.append(File.generated(config, f"reference/{name}.md", content=page()))
    for name in beside():
        files.append(File.generated(config, place_of(name), abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Point links of the repository to their places on the site."""
    uri = page.file.src_uri
    if uri.startswith("reference/"):
        return markdown
    folder = posixpath.dirname("README.md" if uri == "index.md" else uri if uri in beside() else f"docs/{uri}")

    def moved(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[2]))
        return link[1] + posixpath.relpath(place_of(target), posixpath.dirname(uri) or ".")

    # "```sh run" is a block that tests run (tests/process/test_runbook.py).
    return _LINK.sub(moved, re.sub(r"^(```\w+) .*$", r"\1", markdown, flags=re.MULTILINE))


def _without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


if __name__ == "__main__":
    sys.stdout.write(PAGES[sys.argv[1]]())
