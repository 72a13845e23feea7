"""Tasks of Django as messages (docs/django.md): ``TaskBackend`` for TASKS, ``ticket`` below ``@task``, and ``run_task``
for USHER_HANDLER. Needs Django 6, or Django with the package django-tasks."""

from __future__ import annotations

from usher.consumer.handlers.django_tasks import TaskBackend, run_task, ticket

__all__ = ["TaskBackend", "run_task", "ticket"]
