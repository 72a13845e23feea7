"""Finding the handler: what is wrong is told in one line that names the setting and the way out."""

from __future__ import annotations

import concurrent.futures
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from usher.common.base.errors import HandlerUnusable
from usher.consumer.handlers.loader import _tell_of_future, check_ran, load_handler

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A handler's project: an empty current folder. What is imported from it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(project: Path, name: str, text: str) -> None:
    path = project / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))


def refusal(spec: str) -> str:
    with pytest.raises(HandlerUnusable) as refused:
        load_handler(spec)
    text = str(refused.value)
    assert "USHER_HANDLER" in text
    assert "\n" not in text
    return text


class TestFound:
    def test_a_batch_that_cannot_be_is_said_at_the_start(self, project: Path) -> None:
        write(project, "many.py", "from usher import batch\n@batch(0)\ndef handle(messages): ...")
        assert "most must be 1 to" in refusal("many:handle")

    def test_a_function_in_a_package_and_a_method_of_an_object(self, project: Path) -> None:
        write(project, "shop/__init__.py", "")
        write(
            project,
            "shop/orders.py",
            """
            class Orders:
                def handle(self, message): return message
            orders = Orders()
            """,
        )
        assert load_handler("shop.orders:orders.handle").call("m") == "m"  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        "text",
        [
            "async def handle(message): ...",
            "import functools\nasync def other(log, message): ...\nhandle = functools.partial(other, None)",
            "class Handle:\n    async def __call__(self, message): ...\nhandle = Handle()",
        ],
    )
    def test_what_must_be_awaited_is_told_apart(self, project: Path, text: str) -> None:
        write(project, "orders.py", text)
        assert load_handler("orders:handle").is_async

    @pytest.mark.parametrize(
        "text",
        [
            "def handle(message, retries=3): ...",
            "def handle(*messages): ...",
            "handle = lambda message: None",
            "handle = print",
            "class Handle:\n    def __call__(self, message): ...\nhandle = Handle()",
        ],
    )
    def test_whatever_takes_one_argument_will_do(self, project: Path, text: str) -> None:
        write(project, "orders.py", text)
        assert not load_handler("orders:handle").is_async

    def test_the_handlers_project_does_not_shadow_the_standard_library_or_our_own_packages(
        self, project: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delitem(sys.modules, "colorsys", raising=False)
        write(project, "colorsys.py", "raise RuntimeError('the wrong one')")
        write(
            project,
            "orders.py",
            "import colorsys\nimport usher.common.protocol.keys\ndef handle(message): return"
            " usher.common.protocol.keys.MASTER, colorsys.ONE_SIXTH",
        )
        assert load_handler("orders:handle").call("m") == (b"master", 1 / 6)  # type: ignore[arg-type]


class TestRefused:
    @pytest.mark.parametrize("spec", ["", "orders", "orders.handle", ":handle", "orders:", ":"])
    def test_what_does_not_look_like_one(self, project: Path, spec: str) -> None:
        assert refusal(spec) == f"USHER_HANDLER must look like module:function (it is {spec!r})"

    def test_a_module_that_is_not_there(self, project: Path) -> None:
        assert (
            refusal("orders:handle")
            == f"USHER_HANDLER=orders:handle: there is no module 'orders' in {project} or on the Python path: "
            + "install its project, or name its folder in PYTHONPATH"
        )

    @pytest.mark.parametrize(
        ("text", "told"),
        [
            ("import not_installed", "ModuleNotFoundError: No module named 'not_installed'"),
            ("1 / 0", "ZeroDivisionError: division by zero"),
            ("def handle(message:", "SyntaxError: '(' was never closed (orders.py, line 1)"),
            ("import sys\nsys.exit('usage: orders FILE')", "SystemExit: usage: orders FILE"),
            ("from os import nothing_like_that", "ImportError: cannot import name 'nothing_like_that' from 'os'"),
        ],
    )
    def test_a_module_that_cannot_be_imported(self, project: Path, text: str, told: str) -> None:
        write(project, "orders.py", text)
        said = refusal("orders:handle")
        assert said.startswith(f"USHER_HANDLER=orders:handle cannot be imported: {told}")
        assert said.count("orders.py") == 1
        assert f"(orders.py:{text.count(chr(10)) + 1})" in said or "SyntaxError" in said

    def test_where_it_went_wrong_in_another_module_of_the_project(self, project: Path) -> None:
        write(project, "prices.py", "import json\n\nRATES = json.loads('{')")
        write(project, "orders.py", "import prices\ndef handle(message): ...")
        assert refusal("orders:handle").endswith(" (prices.py:3)")

    def test_the_module_that_was_meant_comes_later(self, project: Path) -> None:
        write(project, "queue.py", "def handle(message): ...")
        said = refusal("queue:handle")
        assert said.startswith("USHER_HANDLER=queue:handle: queue (")
        assert said.endswith(
            f"/queue.py, which comes before {project / 'queue.py'}: give that another name) has no handle"
        )
        assert "sys (a part of Python itself) has no handle" in refusal("sys:handle")

    @pytest.mark.parametrize("attribute", ["handel", "orders.handle", "Orders.handel"])
    def test_a_module_without_such_a_function(self, project: Path, attribute: str) -> None:
        write(project, "orders.py", "class Orders: ...\ndef handle(message): ...")
        assert refusal(f"orders:{attribute}") == f"USHER_HANDLER=orders:{attribute}: orders has no {attribute}"

    @pytest.mark.parametrize("signature", ["handle()", "handle(message, more)", "handle(*, message)"])
    @pytest.mark.parametrize("kind", ["def", "async def"])
    def test_a_function_that_does_not_take_one_argument(self, project: Path, kind: str, signature: str) -> None:
        write(project, "orders.py", f"{kind} {signature}: ...")
        assert refusal("orders:handle") == (
            "USHER_HANDLER=orders:handle: it must take exactly one argument, the message, or a typed value and the message"
        )

    @pytest.mark.parametrize(
        "text",
        [
            "def handle(message): yield message",
            "async def handle(message): yield message",
            "class Handle:\n    def __call__(self, message): yield message\nhandle = Handle()",
        ],
    )
    def test_a_generator_of_which_calling_it_would_run_nothing(self, project: Path, text: str) -> None:
        """Each of its messages would count as handled."""
        write(project, "orders.py", text)
        assert "it is a generator" in refusal("orders:handle")

    @pytest.mark.parametrize(
        "text",
        [
            "def __init__(self, database): ...\n    def __call__(self, message): ...",
            "def __call__(self, message): ...",
            "pass",
        ],
    )
    def test_a_class_of_which_calling_it_only_makes_an_object(self, project: Path, text: str) -> None:
        """Each of its messages would count as handled."""
        write(project, "orders.py", f"class Orders:\n    {text}")
        told = (
            "it is a class: calling it makes an object, and handles nothing; make an object of it in the module, and"
            " name that, or that and a method"
        )
        assert refusal("orders:Orders") == f"USHER_HANDLER=orders:Orders: {told} (shop:orders.handle)"

    @pytest.mark.parametrize(
        ("text", "kind"),
        [
            (
                (
                    "def retry(times):\n    return lambda function: lambda message: function(message)\n@retry\ndef"
                    " handle(message): ..."
                ),
                "function",
            ),
            ("import functools\ndef handle(message): return functools.partial(print, message)", "partial"),
            ("async def other(message): ...\ndef handle(message): return other(message)", "coroutine"),
        ],
    )
    def test_only_its_result_shows_that_nothing_was_done(self, project: Path, text: str, kind: str) -> None:
        write(project, "orders.py", text)
        with pytest.raises(HandlerUnusable, match=f"the handler returned '{kind}', so nothing of the message was done"):
            check_ran(load_handler("orders:handle").call("m"))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["common", "master", "consumer", "deploy"])
def test_a_project_may_have_packages_with_the_names_of_our_folders(project: Path, name: str) -> None:
    write(project, f"{name}/__init__.py", "")
    write(project, f"{name}/prices.py", "price = 1")
    write(project, f"{name}/orders.py", f"from {name}.prices import price\ndef handle(message): ...")
    words = [sys.executable, str(ROOT / "usher" / "__main__.py"), "preflight"]
    environ = {"PATH": os.environ["PATH"], "USHER_HANDLER": f"{name}.orders:handle"}
    done = subprocess.run(words, cwd=project, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_future_of_a_pool_is_done_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """What it stands for runs. But nobody waits for it, and hears of its error."""
    _tell_of_future.cache_clear()
    for _ in range(3):
        check_ran(concurrent.futures.Future())
    assert [record.getMessage() for record in caplog.records] == ["handler_returned_future"]
