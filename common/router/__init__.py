"""The parts of ``usher.common.router.router``: any number of streams on a handful of connections.

``book`` (pure) knows every stream's subscriptions and decides what is read next and what a reply means; ``sizing``
(pure) how many readers there are and how much is looked at in passing; ``desk`` is the book behind its lock, and hands
entries to ``subscription``. Two kinds of reader work at the desk: ``change_reader`` (one thread and connection: Redis
says which keys have changed, and just those are read) and the ``pool`` of the portable mode (every reader takes its
turn of all streams).
"""
