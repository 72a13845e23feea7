"""``usher torture``: does a user's own handler keep its effects right under what Usher may do to it?

At least once means that a handler meets repeats, deaths in the middle, and zombies. They are rare, so nobody sees them
in a test; here they are staged. Each *scenario* (``scenarios.py``) is a short story of three messages of one ticket,
told to real processes which run the handler: where a process dies it dies of ``kill -9``, where it stands still it does
so by ``SIGSTOP``; the messages are entries of a stream in a real Redis, with the ids and fields that a consumer would
have. What is not left to chance is the order: who runs which message when, under which fence. Deaths, errors and pauses
are tried *before every line* of the handler (``steps.py`` stops it there).

Whether it went well is asked of the effect alone (``effects.py``): after the story a ticket must look like one whose
three messages were handled once each, in order, without any trouble.

::

    usher torture (commands/torture.py) or the pytest fixture       starts Redis and the stage, shows what it tells
      stage (__main__.py, stage.py)                                 one process without threads; tells the stories
        actor (actor.py)                                            forked; one incarnation of a consumer; runs the handler
"""
