"""An app of Django with tasks, for tests of ``usher.django``; and Django itself, set up once in a process."""

from __future__ import annotations

import django
from django.conf import settings


def set_up() -> None:
    """Set Django up, once, with this app and a database in memory."""
    if not settings.configured:
        settings.configure(
            DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
            INSTALLED_APPS=["tests.django_shop"],
            TASKS={"default": {"BACKEND": "usher.django.TaskBackend", "OPTIONS": {"outbox": "default"}}},
            USE_TZ=True,
        )
        django.setup()
