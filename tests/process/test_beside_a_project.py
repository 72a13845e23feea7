"""The wheel beside a project that has packages named as our folders are: its tests, its handler and its web app work;
and the wheel alone: it writes the folder of `usher init-deploy`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.process.machine import UsherUp, until
from tests.process.test_init_deploy import copy_of_the_checkout

pytestmark = pytest.mark.process

_PROJECT = {
    "common/__init__.py": "",
    "common/prices.py": "PRICE = 5\n",
    "consumer/__init__.py": "",
    "consumer/work.py": """
        from usher import GiveUp, Message, handler
        from common.prices import PRICE
        from master.paths import DONE

        @handler(max_attempts=3)
        def handle(message: Message) -> None:
            if "count" not in message.fields:
                raise GiveUp("no count")
            with DONE.open("a") as file:
                file.write(f"{message.ticket_id} {PRICE * int(message.fields['count'])}\\n")
        """,
    "master/__init__.py": "",
    "master/paths.py": "from pathlib import Path\nDONE = Path(__file__).with_name('done')\n",
    "deploy/__init__.py": "",
    "deploy/web.py": """
        import os
        from flask import Flask
        from common.prices import PRICE
        from usher import Link, Producer

        app = Flask(__name__)
        producer = Producer(Link(os.environ["REDIS_URL"], "shop"), "ticket_stream")

        @app.post("/orders/<ticket>/<int:count>")
        def order(ticket, count):
            return {"id": producer.send(ticket, {"count": count}), "price": PRICE}
        """,
    "tests/test_shop.py": """
        import common, common.prices, consumer.work, deploy, master

        def test_the_packages_are_the_projects():
            for package in (common, consumer, deploy, master):
                assert str(package.__file__).startswith(__file__.rpartition("/tests/")[0])
            assert common.prices.PRICE == 5
        """,
    "pytest.ini": "[pytest]\npythonpath = .\n",
}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_project_with_packages_of_the_same_names_runs_with_the_wheel(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("USHER_", "PYTHON", "PYTEST"))}

    def run(*words: str | Path, cwd: Path = folder) -> str:
        done = subprocess.run(words, env=environ, cwd=cwd, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    copied = copy_of_the_checkout(folder / "tree", "tests/")
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", folder / "wheels", folder / "tree")
    shutil.rmtree(folder / "tree")
    (wheel,) = (folder / "wheels").iterdir()
    site = folder / "site"
    run(sys.executable, "-m", "pip", "install", "--no-deps", "--target", site, wheel)
    (told,) = site.glob("*.dist-info/top_level.txt")
    assert told.read_text().split() == ["usher"]
    held = {str(file.relative_to(site / "usher")) for file in (site / "usher").rglob("*") if file.is_file()}
    packaged = ("common/", "consumer/", "deploy/", "master/")
    left = ("deploy/container/", "deploy/kubernetes/", "deploy/systemd/")  # for those who have a checkout
    kept = {name for name in copied if name.startswith(packaged) and not name.startswith(left)}
    assert kept <= held and {"py.typed", "testing.py", "deploy/testkit/pytest_plugin.py"} <= held
    assert {entry.name.partition("-")[0] for entry in site.iterdir()} <= {"usher", "usher_streams", "bin"}

    project = folder / "shop"
    for name, text in _PROJECT.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(textwrap.dedent(text))
    environ["PYTHONPATH"] = str(site)
    run(sys.executable, site / "usher" / "__main__.py", "init-deploy", folder / "made")
    made = {file.name for file in (folder / "made").iterdir()}
    assert made >= {"supervisord.conf", "usher.env", "redis.conf", "runbook.md", "alerts.yml", "start"}
    assert str(site) in (folder / "made" / "supervisord.conf").read_text()
    assert "1 passed" in run(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", cwd=project)

    monkeypatch.setattr("tests.process.machine.USHER", [sys.executable, str(site / "usher" / "__main__.py")])
    with UsherUp(project, "--handler", "consumer.work:handle", "--consumers", "1", PYTHONPATH=str(site)) as up:
        environ["REDIS_URL"] = up.told()["redis_url"]
        order = "from deploy.web import app; print(app.test_client().post('/orders/T1/3').json)"
        assert "'price': 5" in run(sys.executable, "-c", order, cwd=project)
        done = project / "master" / "done"
        until(lambda: done.exists() and done.read_text() == "T1 15\n", 60, "the order was handled")
