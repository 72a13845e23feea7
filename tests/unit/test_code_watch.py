"""The watch of ``usher up --reload``: what counts as a change."""

from __future__ import annotations

from pathlib import Path

from usher.deploy.local.code_watch import CodeWatch


def test_python_files_of_the_project_are_watched_and_nothing_else(tmp_path: Path) -> None:
    for name in ("shop/orders.py", ".git/hook.py", "venv/lib/other.py", "shop/__pycache__/orders.py", "shop/notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    (tmp_path / "venv" / "pyvenv.cfg").write_text("")
    watch = CodeWatch(tmp_path)
    assert watch.changed() == []
    for name in (".git/hook.py", "venv/lib/other.py", "shop/__pycache__/orders.py", "shop/notes.txt"):
        (tmp_path / name).write_text("changed")
    assert watch.changed() == []
    (tmp_path / "shop" / "orders.py").write_text("changed")
    assert watch.changed() == ["shop/orders.py"]
    (tmp_path / "shop" / "new.py").write_text("1")
    (tmp_path / "shop" / "orders.py").unlink()
    assert watch.changed() == ["shop/new.py", "shop/orders.py"]
    assert watch.changed() == []
