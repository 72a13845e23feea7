"""Tasks of Django (``django.tasks`` of Django 6, or the backport ``django-tasks``) as messages: a backend that sends
them, and the handler that runs them. Public as ``usher.django``::

    TASKS = {"default": {"BACKEND": "usher.django.TaskBackend", "OPTIONS": {"outbox": "default"}}}

    @task
    @ticket("account")  # the argument that names the ticket
    def book(account: int, amount: str) -> None: ...

A message has the fields ``action`` (``task``), ``object`` (the task's path) and ``data`` (its arguments as JSON), with
the result's id as uid: the same from the outbox and straight to Redis.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import platform
import uuid
import weakref
from collections.abc import Callable
from traceback import format_exception
from typing import Any, TypeVar

import django
from django.apps import apps
from django.core.exceptions import ImproperlyConfigured
from django.db import InterfaceError, OperationalError, close_old_connections, connections
from django.utils import timezone
from django.utils.module_loading import import_string

from usher.common.base.errors import GiveUp, HandlerUnusable, Invalid, RetryLater
from usher.common.base.log import WARNING, event
from usher.common.base.text import format_error
from usher.common.outbox.rows import as_json
from usher.common.protocol.message import key_bytes
from usher.common.sending.producer import Producer

try:
    from django.tasks.backends.base import BaseTaskBackend
    from django.tasks.base import Task, TaskContext, TaskError, TaskResult, TaskResultStatus
    from django.tasks.exceptions import InvalidTask
    from django.tasks.signals import task_enqueued, task_finished, task_started
except ImportError:  # before Django 6
    from django_tasks.backends.base import BaseTaskBackend
    from django_tasks.base import Task, TaskContext, TaskError, TaskResult, TaskResultStatus
    from django_tasks.exceptions import InvalidTaskError as InvalidTask
    from django_tasks.signals import task_enqueued, task_finished, task_started

F = TypeVar("F", bound=Callable[..., Any])

#: Where ``ticket`` notes the name of the argument on a task's function; None: no order.
_MARK = "__usher_ticket__"
_OPTIONS = frozenset({"redis", "stream", "ticket_field", "outbox", "ticket"})
ACTION = "task"
_AGAIN_S = 1.0


def ticket(argument: str | None) -> Callable[[F], F]:
    """Name the argument of a task whose value is the ticket id: tasks with the same one run one by one, in their order.
    None: each task is a ticket of its own. A decorator, below ``@task``."""

    def mark(function: F) -> F:
        if isinstance(function, Task):
            raise TypeError("@ticket(...) stands below @task: it is of the function")
        setattr(function, _MARK, argument)
        return function

    return mark


class TaskBackend(BaseTaskBackend):
    """Django's task backend. OPTIONS: ``outbox``, the alias of the database in whose transaction a task is staged, or
    ``redis``, a URL to which it is sent at once; ``stream`` and ``ticket_field`` of the latter, as in ``Producer``;
    ``ticket``, the argument that names the ticket where a task has no ``@ticket``.

    It gives no results (``get_result``), and takes ``run_after`` only with ``redis``.
    """

    supports_async_task = True

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        options = dict(self.options)
        if unknown := set(options) - _OPTIONS:
            raise ImproperlyConfigured(f"TASKS[{alias!r}]: there is no option {', '.join(sorted(unknown))}")
        if bool(options.get("redis")) == bool(options.get("outbox")):
            raise ImproperlyConfigured(
                f"TASKS[{alias!r}]: OPTIONS wants one of outbox (the alias of a database) and redis (a URL)"
            )
        if len(self.queues) != 1:
            raise ImproperlyConfigured(f"TASKS[{alias!r}]: a queue is a stream: give each a backend of its own")
        self.supports_defer = not options.get("outbox")

    def validate_task(self, task: Any) -> None:
        """Raise InvalidTask for what this backend cannot run, also where nothing says which ticket a task has."""
        super().validate_task(task)
        argument = self._ticket_argument(task)
        if argument is not None and argument not in inspect.signature(task.func).parameters:
            raise InvalidTask(
                f"{task.module_path} has no argument {argument!r} that names its ticket"
                if argument
                else f'{task.module_path}: name the argument that is the ticket, @ticket("account") below @task; with'
                " @ticket(None) it runs in no order"
            )

    def enqueue(self, task: Any, args: Any, kwargs: Any) -> Any:
        """Stage the task in the outbox, or send it; return its result, of which only the id will ever be of use. Raises
        what ``write_to_outbox`` and ``Producer.send`` raise."""
        self.validate_task(task)
        result = _result(task, uuid.uuid4().hex, args, kwargs, self.alias)
        ticket_id = self._ticket_id(task, result)
        data = {"args": result.args, "kwargs": result.kwargs}
        object.__setattr__(result, "enqueued_at", timezone.now())
        if outbox := self.options.get("outbox"):
            from usher.common.outbox.store import write_to_outbox  # needs SQLAlchemy, an extra

            write_to_outbox(
                connections[outbox],
                ticket_id=ticket_id,
                action=ACTION,
                object=task.module_path,
                data=data,
                uid=result.id,
            )
        else:
            fields = {"action": ACTION, "object": task.module_path, "data": as_json("data", data)}
            producer = _producer(*(self.options.get(name) for name in ("redis", "stream", "ticket_field")))
            producer.send(ticket_id, fields, result.id, task.run_after and int(1000 * task.run_after.timestamp()))
            for used in connections.all(initialized_only=True):
                if used.in_atomic_block:
                    _tell_of_rollback(used, task.module_path, str(result.id))
        task_enqueued.send_robust(type(self), task_result=result)
        return result

    def _ticket_argument(self, task: Any) -> str | None:
        return getattr(task.func, _MARK, self.options.get("ticket", ""))

    def _ticket_id(self, task: Any, result: Any) -> Any:
        """Return the value of the argument that names the ticket. Raises TypeError for what is no key of a ticket, and
        for arguments that the task does not take."""
        context = (None,) if task.takes_context else ()
        bound = inspect.signature(task.func).bind(*context, *result.args, **result.kwargs)
        argument = self._ticket_argument(task)
        if argument is None:
            return result.id
        bound.apply_defaults()
        value = bound.arguments[argument]
        key_bytes(f"{task.module_path}: {argument}, which names the ticket,", value)
        return value


class TaskHandler:
    """The handler of such messages: ``USHER_HANDLER=usher.django:run_task``, with DJANGO_SETTINGS_MODULE.

    Runs only tasks in modules of INSTALLED_APPS: a message imports nothing else. A task that raises is tried again as
    any message is; ``GiveUp`` and ``RetryLater`` mean what they mean elsewhere. Where a database of Django is away, its
    message waits, uncharged.
    """

    def usher_kind_of(self, message: Any) -> str:
        return str(message.fields.get("object"))

    def handler_body(self) -> Callable[[Any], None]:
        """Return what is called, with Django set up. Raises HandlerUnusable where it cannot be."""
        if not apps.ready:
            try:
                django.setup()
            except Exception as problem:
                raise HandlerUnusable(f"Django (DJANGO_SETTINGS_MODULE): {format_error(problem)}") from problem
        return self

    def __call__(self, message: Any) -> None:
        self.handler_body()
        if message.is_rehearsal:
            raise GiveUp("a task of Django knows nothing of rehearsals: its effects would stay")
        path, args, kwargs = _read(message.fields)
        task = _task(path)
        result = _result(task, message.uid, args, kwargs, task.backend)
        now = timezone.now()
        worker = f"{platform.node()}:{os.getpid()}"
        _change(result, status=TaskResultStatus.RUNNING, started_at=now, last_attempted_at=now)
        result.worker_ids.extend([worker] * message.attempt)
        backend = type(task.get_backend())
        context = (TaskContext(task_result=result),) if task.takes_context else ()
        close_old_connections()
        try:
            task_started.send_robust(backend, task_result=result)
            value = task.call(*context, *args, **kwargs)
            if isinstance(value, BaseException):
                raise value
            _change(result, status=TaskResultStatus.SUCCESSFUL, finished_at=timezone.now(), _return_value=value)
            task_finished.send_robust(backend, task_result=result)
        except RetryLater:
            raise
        except Exception as problem:
            if isinstance(problem, (InterfaceError, OperationalError)) and not _reaches_databases():
                raise RetryLater(_AGAIN_S, format_error(problem), is_away=True) from problem
            path = f"{type(problem).__module__}.{type(problem).__qualname__}"
            result.errors.append(TaskError(exception_class_path=path, traceback="".join(format_exception(problem))))
            _change(result, status=TaskResultStatus.FAILED, finished_at=timezone.now())
            task_finished.send_robust(backend, task_result=result)
            raise
        finally:
            close_old_connections()


run_task = TaskHandler()


def _reaches_databases() -> bool:
    try:
        for used in connections.all(initialized_only=True):
            used.ensure_connection()  # it may only have been closed since it was needed last
            if not used.is_usable():
                return False
    except (InterfaceError, OperationalError):
        return False
    return True


@functools.cache
def _producer(redis: str, stream: str | None, ticket_field: str | None) -> Producer:
    """Return the one producer of this process for a stream: Django makes a backend for each thread."""
    given = {"stream": stream, "ticket_field": ticket_field}
    return Producer(redis, **{name: value for name, value in given.items() if value})  # type: ignore[arg-type]


def _tell_of_rollback(used: Any, task: str, uid: str) -> None:
    """Have the log say that a task runs all the same whose transaction is rolled back. Django tells of commits alone,
    but drops what waits for one with its savepoint."""

    def committed() -> None:
        undone.detach()

    facts = {"task": task, "uid": uid, "database": used.alias, "way_out": "OPTIONS outbox, or transaction.on_commit"}
    undone = weakref.finalize(committed, lambda: event("task_sent_and_rolled_back", level=WARNING, **facts))
    undone.atexit = False
    used.on_commit(committed)


def _result(task: Any, result_id: str, args: Any, kwargs: Any, backend: str) -> Any:
    own: dict[str, Any] = {"task": task, "id": result_id, "status": TaskResultStatus.READY, "backend": backend}
    times = dict.fromkeys(("enqueued_at", "started_at", "finished_at", "last_attempted_at"))
    return TaskResult(**own, **times, args=list(args), kwargs=kwargs, errors=[], worker_ids=[])


def _change(result: Any, **values: Any) -> None:
    for name, value in values.items():
        object.__setattr__(result, name, value)  # frozen; Django's own backends do the same


def _read(fields: Any) -> tuple[str, list[Any], dict[str, Any]]:
    if fields.get("action") != ACTION:
        raise Invalid(f"no task of Django: action is {fields.get('action')!r}, and not {ACTION!r}")
    try:
        data = json.loads(fields.get("data", ""))
        args, kwargs = data["args"], data["kwargs"]
        if not isinstance(args, list) or not isinstance(kwargs, dict):
            raise TypeError("args is a list, kwargs an object")
    except (ValueError, KeyError, TypeError, RecursionError) as wrong:
        raise Invalid(f'data is not {{"args": [...], "kwargs": {{...}}}}: {wrong}') from None
    return str(fields.get("object", "")), args, kwargs


def _task(path: str) -> Any:
    if apps.get_containing_app_config(path.rpartition(".")[0]) is None:
        raise LookupError(f"{path}: its module belongs to no app of INSTALLED_APPS, so nothing is imported")
    try:
        task = import_string(path)
    except ImportError as missing:
        raise LookupError(f"{path}: {missing}") from missing
    if not isinstance(task, Task):
        raise LookupError(f"{path} is no task of Django")
    return task
