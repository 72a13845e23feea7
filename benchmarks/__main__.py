"""``python -m benchmarks NAME``, in the root of a checkout."""

from __future__ import annotations

from benchmarks.cli.main import benchmarks

if __name__ == "__main__":
    benchmarks(prog_name="python -m benchmarks")
