"""The budget of the product, `tests/budget.toml`: `python -m tests.budget` prints what is used of it and lowers it to
what there is. With `--spare`, what is let go stays in the sum as `spared`: lines that pay for a feature to come."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from typing import Any

from tests import rules, test_architecture

_FILE = rules.ROOT / "tests" / "budget.toml"
_HEAD = """\
# Most shipped lines (py, lua, html, js, css, sql) by room, and most of what buys size. A commit may only lower a number
# (a room that moves takes its lines along: the sum is what may not grow): `python -m tests.budget` does it.
"""


def read() -> dict[str, dict[str, int]]:
    return tomllib.loads(_FILE.read_text(encoding="utf-8"))


def former() -> dict[str, dict[str, int]] | None:
    """The budget of the commit before this one; None where git or that commit is not at hand, or it had none."""
    text = _git("show", "HEAD^:tests/budget.toml") if _git("diff", "HEAD", "--", str(_FILE)) == "" else None
    text = text if text is not None else _git("show", "HEAD:tests/budget.toml")
    return tomllib.loads(text) if text else None


def _git(*words: str) -> str | None:
    try:
        done = subprocess.run(["git", *words], cwd=rules.ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


def sums(of: dict[str, dict[str, int]]) -> dict[str, int]:
    """Return what may not grow: all rooms' lines, and each count; what is spared is counted as if it were there."""
    spared = of.get("spared", {})
    return {
        what: count + spared.get(what, 0)
        for what, count in {"lines": sum(of["lines"].values()), **of["counts"]}.items()
    }


def raised(before: dict[str, dict[str, int]], now: dict[str, dict[str, int]]) -> list[str]:
    """Name what a commit raised."""
    old = sums(before)
    return [f"{what}: {new}, at most {old[what]}" for what, new in sums(now).items() if new > old.get(what, new)]


def main() -> None:
    """Lower the budget, and print it."""
    lines, counts = rules.shipped_lines(), {what: len(find()) for what, find in test_architecture.COUNTED.items()}
    old: dict[str, Any] = read() if _FILE.exists() else {"lines": lines, "counts": counts}
    for room, count in sorted(lines.items()):
        print(f"{count:6} of {old['lines'].get(room, 0):6}  {room}")
    print(f"{sum(lines.values()):6} of {sum(old['lines'].values()):6}  in all; spared: {old.get('spared', {})}")
    for what, count in counts.items():
        print(f"{count:6} of {old['counts'].get(what, 0):6}  {what}")
    new = {"lines": lines, "counts": counts}
    left = {what: sums(old)[what] - sums(new)[what] for what in ("lines", "test_lines")}
    kept = left if "--spare" in sys.argv else old.get("spared", {})
    new["spared"] = {what: max(0, min(count, kept.get(what, 0))) for what, count in left.items()}
    if found := raised(old, new):
        raise SystemExit("over the budget, which stays as it is: " + "; ".join(found))
    tables = [
        f"[{name}]\n" + "".join(f'"{key}" = {value}\n' for key, value in sorted(of.items())) for name, of in new.items()
    ]
    _FILE.write_text(_HEAD + "\n" + "\n".join(tables), encoding="utf-8")


if __name__ == "__main__":
    main()
