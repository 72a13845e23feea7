"""``deploy/env.example`` from the settings classes: ``python -m tests.env_example > deploy/env.example``."""

from __future__ import annotations

import sys
from typing import Any

from usher.common.runtime.settings import CommonSettings, name_of
from usher.consumer.settings import ConsumerSettings
from usher.master.audit.settings import AuditSettings
from usher.master.settings import MasterSettings, StreamerSettings

_HEAD = """\
# Settings of Usher, each with its default. Made from the settings classes: python -m tests.env_example > deploy/env.example
# Numbers are in the unit that the name says. Every setting is also a flag: USHER_LEASE_SECONDS is --lease-seconds.
"""


def text() -> str:
    """The whole file."""
    common = set(CommonSettings.model_fields)
    parts = [
        _part("master and consumer", CommonSettings, common),
        _part("master", MasterSettings, set(MasterSettings.model_fields) - common),
        _part("streamer", StreamerSettings, set(StreamerSettings.model_fields) - common),
        _part("consumer", ConsumerSettings, set(ConsumerSettings.model_fields) - common),
        _part("audit", AuditSettings, set(AuditSettings.model_fields) - set(ConsumerSettings.model_fields)),
    ]
    return _HEAD + "".join(parts)


def _part(title: str, cls: type[CommonSettings], fields: set[str]) -> str:
    lines = [f"\n# ---- {title} ----\n"]
    for field, info in cls.model_fields.items():
        if field in fields:
            needed = " Must be set." if info.is_required() else ""
            lines.append(
                f"\n# {info.description}{needed}\n#{name_of(field)}={'' if info.is_required() else _shown(info.default)}\n"
            )
    return "".join(lines)


def _shown(default: Any) -> str:
    return "" if default is None else str(default).lower() if isinstance(default, bool) else str(default)


if __name__ == "__main__":
    sys.stdout.write(text())
