"""One SparkSession for all tests of the audit, started when the first of them needs it; none of them runs where PySpark
is not installed."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.audit.faults import FAULTS
from usher.master.audit.engine import HOW_TO_INSTALL, Engine, SparkEngine, local_engine, spark_engine
from usher.master.audit.settings import AuditChoices, archive_at

#: What the tests' environment has to have.
_NEEDED = ("pyspark", "pyarrow", "pandas")

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Starting Java takes its time on a busy machine, in each of its workers anew: in a plain run only test_faults.py does,
    where an audit by Spark finds every ninth fault."""
    for item in items:
        if not item.path.is_relative_to(_HERE):
            continue
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(1200))
        given = getattr(item, "callspec", None)
        is_sample = given is not None and given.params.get("fault") in FAULTS[::9]
        if "spark" in getattr(item, "fixturenames", ()) or (
            given and given.params.get("report") == "spark" and not is_sample
        ):
            item.add_marker("slow")


@pytest.fixture(scope="session", autouse=True)
def _settled_soon() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("usher.master.audit.findings.SETTLE_S", 0.1)
        yield


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkEngine]:
    """Spark with our data sources, set up for little data; spark-defaults.conf says something else than we do."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed, so the audit is not tested: {HOW_TO_INSTALL}")
    folder = tmp_path_factory.mktemp("spark")
    kept = dict(os.environ)
    (folder / "spark-defaults.conf").write_text("spark.sql.execution.arrow.maxRecordsPerBatch 5000\n")
    os.environ["SPARK_CONF_DIR"] = str(folder)
    try:
        with (
            pytest.MonkeyPatch.context() as patched,
            spark_engine(AuditChoices(audit_dir=str(folder), memory_mib=512), folder, os.environ, small=True) as engine,
        ):
            importlib.import_module("usher.master.audit.source").register(engine.spark)
            patched.setattr("usher.master.audit.engine.spark_engine", lambda *_: contextlib.nullcontext(engine))
            yield engine
    finally:
        os.environ.clear()
        os.environ.update(kept)


@pytest.fixture(scope="session")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The engine in this process."""
    with local_engine(tmp_path_factory.mktemp("local"), 512) as engine:
        yield engine


@pytest.fixture(scope="session", params=["local", pytest.param("spark", marks=pytest.mark.slow)])
def session(request: pytest.FixtureRequest) -> Any:
    """A session of each engine; of Spark in the nightly run, beside the few tests that say ``spark``."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def bucket() -> Iterator[Any]:
    """The file system of an S3 over HTTP on loopback (moto's), with a bucket in it."""
    s3fs = pytest.importorskip("s3fs", reason="pip install -e '.[test]'")
    moto = pytest.importorskip("moto.server", reason="pip install -e '.[test]'")
    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    url = "http://{}:{}".format(*server.get_host_and_port())
    with pytest.MonkeyPatch.context() as patched:
        given = {"ENDPOINT_URL": url, "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b", "DEFAULT_REGION": "us-east-1"}
        for name, value in given.items():
            patched.setenv(f"AWS_{name}", value)
        store = s3fs.S3FileSystem()
        store.mkdir("bucket")
        yield store
    s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


@pytest.fixture
def stored(bucket: Any, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """The place of an archive in it."""
    return archive_at(f"s3://bucket/{request.node.originalname}/archive", tmp_path)


@pytest.fixture
def settings(audit_environ: dict[str, str]) -> dict[str, str]:
    return audit_environ
