"""``usher torture``: fault injection for a user's own handler, and a verdict on its effects.

At-least-once delivery means that a handler meets repeats, deaths in the middle, and zombies. They are too rare to show
in a test, so here they are staged. Each *scenario* (``scenarios.py``) is a short story of three messages of one ticket,
played by real processes that run the handler: where one dies it dies of ``kill -9``, where one stands still it does so
by ``SIGSTOP``; the messages are entries of a stream in a real Redis, with the ids and fields that a consumer would
have. Only the order is not left to chance: which process runs which message when, under which fence. Deaths, errors and
pauses are tried *before every line* of the handler (``LineStops`` stops it there).

The effect alone decides (``findings.py``): after the story a ticket must look like one whose three messages were
handled once each, in order, without any trouble.

::

    usher torture (cli.py) or the pytest fixture  starts Redis and the harness, shows the result
      harness (harness.py)                        one process without threads; runs the scenarios
        child (child.py)                          forked; plays one incarnation of a consumer; runs the handler
"""
