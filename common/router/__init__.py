"""The parts of ``usher.common.router.router``: any number of streams on a handful of connections.

``schedule`` (pure) knows every stream's subscriptions, decides what is read next and interprets a reply; ``desk`` is
the schedule behind its lock, with the subscriptions that get the entries.
"""
