"""The parts of ``usher.common.router.router``: any number of streams on a handful of connections.

``schedule`` (pure) knows every stream's subscriptions, decides what is read next and interprets a reply;
``coordinator`` is the schedule behind its lock, and hands entries to ``subscription``. Two kinds of reader use the
coordinator: ``change_driven`` (one thread and connection: Redis says which keys have changed, and only those are read)
and ``polling``, where Redis cannot say so (``worker_count`` readers, and every stream has its turn).
"""
