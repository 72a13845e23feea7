"""Files that only their owner may read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from usher.common.base.errors import StartRefused
from usher.common.redis.locate import write_whole


def test_what_is_written_is_for_its_owner_alone(tmp_path: Path) -> None:
    write_whole(tmp_path / "up.json", "one")
    write_whole(tmp_path / "up.json", "two")
    assert (tmp_path / "up.json").read_text() == "two"
    assert stat.S_IMODE((tmp_path / "up.json").stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [tmp_path / "up.json"]


def test_a_full_disk_is_told_in_one_line_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, flags, mode: real("/dev/full", 1))
    with pytest.raises(StartRefused, match=r"up\.json cannot be written: No space left on device"):
        write_whole(tmp_path / "up.json", "one")
