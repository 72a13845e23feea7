"""The parts of ``usher.common.router.router``: any number of streams on a handful of connections.

``schedule`` (pure) knows every stream's subscriptions, decides what is read next and interprets a reply; ``sizing``
(pure) computes the number of readers and the size of a sweep; ``coordinator`` is the schedule behind its lock, and
hands entries to ``subscription``. Two kinds of reader use the coordinator: ``change_driven`` (one thread and
connection: Redis says which keys have changed, and only those are read) and ``polling``, the pool of the portable mode
(every reader takes its turn of all streams).
"""
