"""``manage.py usher``: `usher run` with a project's settings (docs/django.md)."""

from __future__ import annotations

import os
import sys
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand

from usher.cli import run

_US = "usher"
#: OPTIONS of the task backend that are settings of `usher run`, too.
_SHARED = {"redis": "USHER_REDIS_URL", "stream": "USHER_TICKET_STREAM", "ticket_field": "USHER_TICKET_FIELD"}


class Command(BaseCommand):
    """The command. All words go on to `usher run`, whose handler is that of tasks unless one is named."""

    def run_from_argv(self, argv: list[str]) -> None:
        options: dict[str, Any] = getattr(settings, "TASKS", {}).get("default", {}).get("OPTIONS", {})
        for name in _SHARED.keys() & options:
            os.environ.setdefault(_SHARED[name], options[name])
        sys.exit(run(["run", "--handler", f"{_US}.django:run_task", *argv[2:]], name=f"manage.py {_US}"))
