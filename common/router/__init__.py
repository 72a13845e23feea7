"""The parts of ``usher.common.router.router``: any number of streams on a handful of connections. ``desk``: the
subscriptions, and the queue of those that are to be read.
"""
