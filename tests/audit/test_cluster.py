"""spark-submit against a real standalone master with two workers on loopback; code and packages travel in a zip."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.audit.faults import FAULTS, plant, runs
from tests.audit.seeding import CAP, GROUP, Seeder
from tests.audit.test_job import plan
from tests.hands import free_port
from tests.process.machine import USHER, until
from usher.common.protocol.keys import Keys
from usher.common.redis.client import Link

if TYPE_CHECKING:
    from usher.master.audit.engine import SparkEngine

ROOT = Path(__file__).parents[2]
_PATIENCE_S = 120.0


def package(target: Path) -> Path:
    """What executors need of Usher, as the README makes it."""
    with zipfile.ZipFile(target, "w") as zipped:
        for folder in ("usher", "common", "master"):  # as `python -m zipfile -c usher.zip usher`, which follows links
            for file in sorted((ROOT / folder).rglob("*")):
                if file.is_file() and "__pycache__" not in file.parts:
                    name = file.relative_to(ROOT)
                    zipped.write(file, name if folder == "usher" else Path("usher") / name)
    return target


def of_spark() -> dict[str, str]:
    """The environment for programs of Spark; the test is skipped where there is none."""
    pyspark = pytest.importorskip("pyspark", reason="pip install -e '.[audit]' in Usher's folder")
    if (on_path := shutil.which("java")) is None:
        pytest.skip("Spark's own scripts need Java on the PATH")
    home, ours = Path(pyspark.__file__).parent, ("USHER_", "SPARK_", "PYSPARK_", "PYTHONPATH")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)} | {
        "JAVA_HOME": str(Path(on_path).resolve().parents[1]),
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "SPARK_DAEMON_MEMORY": "256m",
    }


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """URL of a standalone master, and the environment for programs that use it."""
    environ = of_spark()
    if os.geteuid() or shutil.which("unshare") is None:
        pytest.skip("root alone can hide a folder from the workers (unshare --mount)")
    home, port = Path(environ["SPARK_HOME"]), free_port()
    url = f"spark://127.0.0.1:{port}"
    log = tmp_path / "cluster.log"
    processes: list[subprocess.Popen[bytes]] = []

    def start(*words: str, hides: Path | None = None) -> None:
        """``hides``: a folder that this program sees without anything in it, as one of another machine."""
        called = [str(home / "bin" / "spark-class"), *words]
        if hides is not None:
            mounts = ["sh", "-c", f'mount -t tmpfs none {shlex.quote(str(hides))} && exec "$@"', "sh"]
            called = ["unshare", "--mount", *mounts, *called]
        with log.open("ab") as out:
            processes.append(subprocess.Popen(called, env=environ, cwd=tmp_path, stdout=out, stderr=out))

    try:
        start("org.apache.spark.deploy.master.Master", "--host", "127.0.0.1", "--port", str(port), "--webui-port", "0")
        for number in (1, 2):
            place, hidden = tmp_path / f"worker{number}", tmp_path / "hidden"
            hidden.mkdir(exist_ok=True)
            words = ["--cores", "1", "--memory", "1g", "--host", "127.0.0.1", "--webui-port", "0", "--work-dir"]
            start("org.apache.spark.deploy.worker.Worker", *words, str(place), url, hides=hidden)
        until_s = time.monotonic() + _PATIENCE_S
        while log.read_text(errors="replace").count("Registering worker") < 2:
            assert time.monotonic() < until_s, log.read_text(errors="replace")[-3000:]
            assert all(process.poll() is None for process in processes), log.read_text(errors="replace")[-3000:]
            time.sleep(0.2)
        yield url, environ
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(30)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(2400)
def test_spark_submit_on_two_workers_finds_the_same(
    bucket: Any, cluster: tuple[str, dict[str, str]], spark: SparkEngine, link: Link, redis_url: str, tmp_path: Path
) -> None:
    from usher.master.audit.job import AuditRun

    faults = [one for one in FAULTS if one.seed.__module__ == runs.__name__]
    for one in faults:
        plant(Seeder(link, one.name), link, one.seed)
    streams = [one.name for one in faults]
    url, environ = cluster
    here = AuditRun(spark, plan(redis_url, *streams), tmp_path).run()
    settings = {
        "USHER_REDIS_URL": redis_url,
        "USHER_GROUP": GROUP,
        "USHER_AUDIT_DIR": str(tmp_path / "audit"),
        "USHER_LEASE_SECONDS": "1200",
        "USHER_RUN_LOG_LENGTH": str(CAP),
    }
    zipped = package(tmp_path / "usher.zip")

    def submitted(*words: str, code: int = 1, **confs: str) -> dict[str, Any]:
        given = [
            word for name, value in confs.items() for word in ("--conf", f"spark.{name.replace('__', '.')}={value}")
        ]
        program, submit = ROOT / "usher" / "__main__.py", Path(environ["SPARK_HOME"]) / "bin" / "spark-submit"
        called, about = (
            [submit, "--master", url, "--py-files", zipped, *given, program, "audit", *words, "--json"],
            environ,
        )
        done = subprocess.run(called, env=about | settings, cwd=tmp_path, capture_output=True, text=True, timeout=1000)
        documents = [line for line in done.stdout.splitlines() if line.startswith("{")]
        assert done.returncode == code, f"{done.stdout[-3000:]}\n{done.stderr[-4000:]}"
        if code == 2:
            return {"error": " ".join(done.stdout.split())}  # spark-submit writes both there
        told: dict[str, Any] = json.loads(documents[0])
        return told

    told = submitted("--streams", ",".join(streams), executor__memory="512m", sql__shuffle__partitions="4")
    # A dead incarnation with nothing pending is young here: the limit cannot be set below a second by settings.
    wanted = {(one.check.name, one.stream, one.count) for one in here.found if one.check.name != "consumer_leaked"}
    assert {(one["check"], one["stream"], one["count"]) for one in told["findings"]} == wanted
    used = {place.relative_to(tmp_path).parts[0] for place in tmp_path.glob("worker*/app-*/*/stderr")}
    assert used == {"worker1", "worker2"}, "both workers ran executors"

    words = ("--streams", "begun_behind_a_later_one", "prove")
    told = submitted(*words, executor__memory="512m", sql__shuffle__partitions="3", sql__adaptive__enabled="false")
    found = {(one["check"], e["id"] or e["owner"]) for one in told["findings"] for e in one["examples"]}
    assert found == {("out_of_order", "5-1")}

    keys = Keys("two_of_a_ticket_at_once", GROUP)
    settings["USHER_AUDIT_DIR"], settings["USHER_STATE_DIR"] = "s3://bucket/cluster", str(tmp_path / "hidden")
    stored = submitted("--streams", keys.stream, "prove", executor__memory="512m", sql__shuffle__partitions="3")
    assert [(one["check"], one["count"]) for one in stored["findings"]] == [("overlap", 1)], "executors read the store"
    link.call("DEL", keys.archived)

    settings["USHER_AUDIT_DIR"] = str(tmp_path / "hidden")
    refused = submitted("--streams", keys.stream, "prove", code=2, executor__memory="512m")["error"]
    assert "is its folder shared with all of Spark's executors?" in refused
    assert link.call("HGET", keys.archived, "proven_until_ms") is None, "nothing is proven"


@pytest.mark.slow
@pytest.mark.process
def test_spark_connect_finds_what_duckdb_finds(link: Link, redis_url: str, tmp_path: Path) -> None:
    pytest.importorskip("grpc_status", reason="pip install 'pyspark[connect]'")
    faults, port = [one for one in FAULTS if one.seed.__module__ == runs.__name__][::9], free_port()
    for one in faults:
        plant(Seeder(link, one.name), link, one.seed)
    environ = of_spark() | {"USHER_GROUP": GROUP, "USHER_REDIS_URL": redis_url, "USHER_RUN_LOG_LENGTH": str(CAP)}
    environ |= {"PYTHONPATH": str(ROOT), "USHER_AUDIT_DIR": str(tmp_path), "SPARK_DAEMON_MEMORY": "1g"}
    confs = {"connect.grpc.binding.port": port, "sql.shuffle.partitions": 1, "ui.enabled": "false"}
    confs |= dict.fromkeys(("sql.adaptive.enabled", "sql.codegen.wholeStage"), "false")
    server = [word for name, value in confs.items() for word in ("--conf", f"spark.{name}={value}")]
    server += ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "spark-internal"]
    found = []
    with (tmp_path / "server.log").open("wb") as log:
        spark_class = Path(environ["SPARK_HOME"]) / "bin" / "spark-class"
        words = [spark_class, "org.apache.spark.deploy.SparkSubmit", *server]
        process = subprocess.Popen(words, env=environ, cwd=tmp_path, stdout=log, stderr=log)
        try:
            until(lambda: "Spark Connect server started" in (tmp_path / "server.log").read_text(), 300, "it answers")
            for flags in (["--engine", "local"], ["--audit-spark-master", f"sc://127.0.0.1:{port}"]):
                words = [*USHER, "audit", "--streams", ",".join(one.name for one in faults), "--json", *flags]
                done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=600, check=False)
                assert done.returncode == 1, done.stderr
                told = json.loads(done.stdout)
                found.append({(one["check"], one["stream"], one["count"]) for one in told["findings"]})
        finally:
            process.terminate()
            process.wait(30)
    aged = {
        one for one in found[0] ^ found[1] if one[0] in ("consumer_leaked", "idle_too_long")
    }  # they were younger in the first run
    assert found[0] ^ found[1] == aged and len(found[0]) >= len(faults) // 2
