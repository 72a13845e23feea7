"""Rules of layout and imports, executed. Every rule has a second test that shows it can fail."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import budget, env_example, rules
from tests.rules import ONLY_IN, PACKAGES, ROOT, Source, sources

_PROGRAM = [*sources(*PACKAGES, "benchmarks", "examples"), *sources("usher")]
_TESTS = sources("tests")
_LUA = ROOT / "common" / "lua"
_SCRIPTS = {
    file.stem: file.read_text(encoding="utf-8")
    for file in sorted(_LUA.glob("*/*.lua"))
    if file.parent.name != "includes"
}
_IMPORT = [sys.executable, "-B", "-m", "tests.import_quietly"]


def _source(text: str, path: str = "common/x.py") -> Source:
    return Source(path, text)


def _clean(findings: list[str]) -> None:
    assert not findings, "\n" + "\n".join(findings)


def test_there_is_something_to_look_at() -> None:
    assert {source.path.partition("/")[0] for source in _PROGRAM} == {*PACKAGES, "benchmarks", "examples", "usher"}
    assert _SCRIPTS


def test_rooms_use_rooms_below_them_only() -> None:
    _clean(rules.upward(_PROGRAM))


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("common/base/x.py", "import usher.master.settings"),
        ("common/base/x.py", "TARGET = 'usher.master.settings:MasterSettings'"),
        ("common/redis/x.py", "def f():\n    from usher.consumer.settings import ConsumerSettings"),
        ("master/leader/x.py", "import usher.consumer.settings"),
        ("consumer/policy/x.py", "import usher.master.settings as s"),
        (
            "master/policy/x.py",
            "from usher.master.settings import MasterSettings\nfrom usher.master.leader import elector",
        ),
        ("master/nowhere/x.py", "import os"),
    ],
)
def test_a_use_of_a_room_above_is_found(path: str, text: str) -> None:
    known = [_source("", f"{folder}/settings.py") for folder in ("master", "consumer")]
    known += [_source("", f"{folder}/__init__.py") for folder in ("master", "consumer", "common")]
    assert len(rules.upward([*known, _source("", "master/leader/elector.py"), _source(text, path)])) == 1


def test_a_use_of_a_room_below_is_none() -> None:
    text = "import usher\nfrom usher.common.base import clock\nfrom usher.master.policy import trim\nfrom . import lag"
    known = [_source("", path) for path in ("common/base/clock.py", "master/policy/trim.py", "master/insight/stats.py")]
    assert not rules.upward([*known, _source(text, "master/insight/x.py")])


@pytest.mark.parametrize("library", ONLY_IN)
def test_a_library_is_imported_in_its_places_only(library: str) -> None:
    _clean([finding for source in _PROGRAM for finding in rules.library_elsewhere(source, library)])


@pytest.mark.parametrize("library", ONLY_IN)
def test_a_library_elsewhere_is_found_and_in_its_place_is_not(library: str) -> None:
    for text in (
        f"import {library}",
        f"import {library}.a as b",
        f"from {library}.a import b",
        f"def f():\n    import {library}",
    ):
        assert rules.library_elsewhere(_source(text, "master/x.py"), library)
        assert not rules.library_elsewhere(_source(text, ONLY_IN[library][0].replace("*", "x")), library)
    assert not rules.library_elsewhere(
        _source(f"from common import {library}_client\nfrom . import {library}", "master/x.py"), library
    )


def test_decisions_are_pure() -> None:
    _clean(rules.impure_decisions(_PROGRAM))


@pytest.mark.parametrize(
    "text",
    [
        "import time",
        "from time import monotonic",
        "def f():\n    import threading",
        "import os.path",
        "from usher.common.base import clock",
        "from usher.common.base.clock import now_s",
        "import random\nrandom.shuffle([])",
        "import random\nrng = random.Random()",
        "from random import Random",
    ],
)
def test_an_impure_decision_is_found_also_through_other_modules(text: str) -> None:
    clock = _source("import time", "common/base/clock.py")
    assert rules.impure_decisions([clock, _source(text, "master/policy/x.py")])
    assert not rules.impure_decisions([clock, _source(text, "master/x.py")])


def test_a_decision_may_take_randomness_and_name_types() -> None:
    randomness = "import random\ndef f(rng: random.Random) -> float:\n    return rng.random()"
    types = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import redis"
    for text in (randomness, types):
        assert not rules.impure_decisions([_source(text, "consumer/policy/x.py")])


def test_threads_begin_in_services_only() -> None:
    _clean([finding for source in _PROGRAM for finding in rules.threads_elsewhere(source)])


@pytest.mark.parametrize(
    "text",
    ["threading.Thread(target=f)", "Thread()", "class A(threading.Thread): ...", "Timer(1, f)", "ThreadPoolExecutor()"],
)
def test_a_thread_elsewhere_is_found(text: str) -> None:
    assert rules.threads_elsewhere(_source(text))
    assert not rules.threads_elsewhere(_source(text, "common/runtime/service.py"))


def test_the_environment_is_read_at_entry_points_only() -> None:
    _clean([finding for source in _PROGRAM for finding in rules.environment_elsewhere(source)])


@pytest.mark.parametrize(
    "text", ["os.environ['A']", "x = os.getenv('A')", "from os import environ", "dict(os.environ)"]
)
def test_a_look_at_the_environment_elsewhere_is_found(text: str) -> None:
    assert rules.environment_elsewhere(_source(text))
    assert not rules.environment_elsewhere(_source(text, "master/__main__.py"))


def test_private_names_of_libraries_are_used_in_adapters_only() -> None:
    _clean([finding for source in _PROGRAM for finding in rules.private_names(source)])


@pytest.mark.parametrize(
    "text", ["connection._sock", "x.y._z = 1", "getattr(a.b, '_sock', None)", "setattr(a, '_b', 1)", "f()._call()"]
)
def test_a_private_name_of_something_else_is_found(text: str) -> None:
    assert len(rules.private_names(_source(text))) == 1
    assert not rules.private_names(_source(text, "common/redis/private_names.py"))


@pytest.mark.parametrize(
    "text", ["self._x", "cls._x()", "row._replace(a=1)", "a.__class__", "class A:\n    def _x(self): ...\nA()._x()"]
)
def test_own_names_and_public_ones_are_none(text: str) -> None:
    assert not rules.private_names(_source(text))


def test_nothing_runs_code_out_of_data() -> None:
    _clean([finding for source in _PROGRAM for finding in rules.dangerous(source)])


@pytest.mark.parametrize(
    "text",
    [
        *(
            "import pickle",
            "from yaml import load",
            "import marshal",
            "eval('1')",
            "exec(x)",
            "os.system(x)",
            "tempfile.mktemp()",
        ),
        *("subprocess.run(x, shell=True)", "subprocess.Popen(x, shell=y)"),
    ],
)
def test_what_runs_code_out_of_data_is_found(text: str) -> None:
    assert rules.dangerous(_source(text))
    assert not rules.dangerous(_source("import json\nre.compile('x')\nmodel.eval()\nsubprocess.run(x, shell=False)"))


def test_functions_can_be_read_to_their_end() -> None:
    found = [finding for source in _PROGRAM for finding in rules.too_long(source)]
    _clean(found + [finding for source in _TESTS for finding in rules.too_long(source, rules.TEST_FUNCTION_LINES)])


def test_lines_of_scripts_are_no_wider_than_those_of_modules() -> None:
    texts = {file.name: file.read_text(encoding="utf-8").splitlines() for file in sorted(_LUA.glob("*/*.lua"))}
    _clean([f"{name}: {line}" for name, lines in texts.items() for line in lines if len(line) > 120])


def test_what_is_too_long_is_found() -> None:
    assert not rules.too_long(_source("def f():\n" + "    pass\n" * 59))
    assert len(rules.too_long(_source("async def f():\n" + "    pass\n" * 60))) == 1


_SHIPPED_SOURCES = [source for source in _PROGRAM if source.path.partition("/")[0] in (*PACKAGES, "usher")]
COUNTED = {
    "crumbs": lambda: rules.crumbs(_SHIPPED_SOURCES),
    "lonely_protocols": lambda: rules.lonely_protocols(_SHIPPED_SOURCES),
    "forwarders": lambda: [found for source in _SHIPPED_SOURCES for found in rules.forwarders(source)],
    "former_versions": lambda: [
        found
        for source in (*_SHIPPED_SOURCES, *(Source(f"common/lua/{name}.lua", text) for name, text in _SCRIPTS.items()))
        for found in rules.for_former_versions(source.path, source.text)
    ],
    "settings": lambda: sorted(set(re.findall(r"^#(USHER_\w+)=", env_example.text(), re.M))),
    "test_lines": lambda: [line for source in _TESTS for line in source.text.splitlines()],
}


@pytest.mark.parametrize("what", COUNTED)
def test_what_buys_size_is_within_the_budget(what: str) -> None:
    found = COUNTED[what]()
    assert len(found) <= budget.read()["counts"][what], "\n" + "\n".join(found[-200:])


def test_every_room_is_within_the_budget() -> None:
    rooms, bounds = rules.shipped_lines(), budget.read()["lines"]
    over = [
        f"{room}: {lines}, at most {bounds.get(room, 0)}"
        for room, lines in rooms.items()
        if lines > bounds.get(room, 0)
    ]
    _clean(over and [*over, "let lines go, here or in another room, and lower its number: python -m tests.budget"])


def test_a_commit_only_lowers_the_budget() -> None:
    former = budget.former()
    if former is None:
        pytest.skip("no commit before this one is at hand")
    assert not budget.raised(former, budget.read())


def test_what_raises_the_budget_is_found() -> None:
    before = {"lines": {"a": 10, "b": 5}, "counts": {"crumbs": 1}}
    assert not budget.raised(before, {"lines": {"a": 9, "c": 6}, "counts": {"crumbs": 1}})  # b went, c is what it was
    assert budget.raised(before, {"lines": {"a": 16}, "counts": {"crumbs": 1}}) == ["lines: 16, at most 15"]
    assert budget.raised(before, {"lines": {"a": 1}, "counts": {"crumbs": 2}}) == ["crumbs: 2, at most 1"]
    spared = {"lines": {"a": 9, "b": 5}, "counts": {"crumbs": 1}, "spared": {"lines": 2}}
    assert budget.raised(before, spared) == ["lines: 16, at most 15"]


@pytest.mark.parametrize(
    ("rule", "bad", "good"),
    [
        (
            rules.forwarders,
            "class A:\n def f(self, a): return self._b.g(a)",
            "class A:\n def f(self, a): return self._b.g(a, 1)",
        ),
        (rules.forwarders, "async def f(a, b): await a.g(b)", "def f(a): return g(a)"),
        (
            lambda one: rules.for_former_versions(one.path, one.text),
            "# as a former version wrote it",
            "# the former owner",
        ),
        (lambda one: rules.contract_leaks(one), "from usher.common.base import clock", "from usher import Link"),
        (
            lambda one: rules.lonely_protocols([one]),
            "class A(Protocol):\n def f(self): ...\nclass B:\n def f(self): ...",
            "class A(Protocol):\n def f(self): ...\nclass B:\n def f(self): ...\nclass C(B):\n def f(self): ...",
        ),
        (lambda one: rules.crumbs([one, _source("x = 1", "common/y.py")]), "from usher.common import y", "x = 1"),
    ],
)
def test_what_buys_size_is_found(rule: Callable[[Source], list[str]], bad: str, good: str) -> None:
    assert len(rule(_source(bad))) == 1
    assert not rule(_source(good))


_CONTRACT = tomllib.loads((ROOT / "tests" / "contract.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("file", [file for files in _CONTRACT.values() for file in files])
def test_contract_tests_use_public_doors(file: str) -> None:
    (found,) = [source for source in _TESTS if source.path == file]
    _clean(rules.contract_leaks(found))


def test_what_runs_at_night_only_is_there() -> None:
    texts = {source.path: source.text for source in _TESTS}
    nightly = tomllib.loads((ROOT / "tests" / "nightly.toml").read_text(encoding="utf-8"))
    _clean(
        [
            f"{file}: {name}"
            for file in nightly
            for name in nightly[file]
            if f"def {name.partition('[')[0]}(" not in texts[file]
        ]
    )


#: Scripts that read entries and count no bytes, and why they need not.
_READS_LITTLE = {
    "send_delayed": "what due_delayed named",
    "dead_letter": "one entry; those behind it are read only where nothing is left of them",
}


@pytest.mark.parametrize("name", _SCRIPTS)
def test_a_script_that_reads_entries_is_bounded_by_bytes(name: str) -> None:
    reads = any(word in _SCRIPTS[name] for word in ("'XRANGE'", "'XREVRANGE'", "body_of(", "read_letter("))
    assert "has_room()" in _SCRIPTS[name] or "each_entry(" in _SCRIPTS[name] or name in _READS_LITTLE or not reads


@pytest.mark.parametrize("name", _SCRIPTS)
def test_every_script_begins_with_its_contract(name: str) -> None:
    _clean(rules.lua_header(name, _SCRIPTS[name]) + rules.lua_keys(name, _SCRIPTS[name]))


def test_a_script_without_its_contract_is_found() -> None:
    good = "-- x: it.\n-- KEYS: 1 a, 2 b\n-- ARGV: none\n-- Returns: 1\n-- Why Lua: so\nreturn KEYS[2]\n"
    assert not rules.lua_header("x", good)
    assert not rules.lua_keys("x", good)
    assert len(rules.lua_header("x", good.replace("-- Why Lua", "-- Reason"))) == 1
    assert rules.lua_header("x", "\n" + good)
    assert rules.lua_keys("x", good + "redis.call('SET', KEYS[3], 1)")
    assert rules.lua_keys("x", good + "redis.call('KEYS', '*')")


@pytest.mark.parametrize("name", _SCRIPTS)
def test_every_script_is_tried_against_a_real_server(name: str) -> None:
    tests = [source for source in _TESTS if source.path.startswith("tests/integration/test_")]
    assert any(f"{name}.lua" in source.text or f'"{name}"' in source.text for source in tests), (
        f"no tests/integration/test_*.py names {name}.lua"
    )


def test_the_example_of_the_settings_is_up_to_date() -> None:
    file = ROOT / "deploy" / "env.example"
    assert file.read_text(encoding="utf-8") == env_example.text(), (
        "run: python -m tests.env_example > deploy/env.example"
    )


def test_importing_a_module_does_nothing() -> None:
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith("USHER_")
    }  # which a library reads that copies them all
    words = [*_IMPORT, *(source.module for source in _PROGRAM)]
    done = subprocess.run(words, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("import socket\ntry: socket.create_connection(('127.0.0.1', 9))\nexcept OSError: pass", "socket.connect"),
        ("import subprocess\nsubprocess.run(['true'])", "subprocess.Popen"),
        (
            "import threading, time\nthreading.Thread(target=time.sleep, args=(0.5,), daemon=True).start()",
            "started a thread",
        ),
        ("import os\nos.environ.get('USHER_GROUP')", "read USHER_GROUP"),
        ("open('made', 'w').close()", "open"),
        ("print('hello')", "printed"),
        ("import nowhere_to_be_found", "cannot be imported"),
    ],
)
def test_an_import_that_does_something_is_found(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "busy_module.py").write_text(text)
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); from tests.import_quietly import main;"
        " sys.exit(main(['busy_module']))"
    )
    done = subprocess.run(
        [sys.executable, "-B", "-c", program, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    (tmp_path / "made").unlink(missing_ok=True)
    (ROOT / "made").unlink(missing_ok=True)
    assert done.returncode == 1
    assert told in done.stdout
