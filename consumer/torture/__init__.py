"""``usher torture``: fault injection for a user's own handler, and a verdict on its effects.

Each *scenario* is a short story of three messages of one ticket, played by real processes that run the handler: where
one dies it dies of ``kill -9``, where one stands still it does so by ``SIGSTOP``, before every line of it. Only which
process runs which message when, under which fence, is not left to chance. The effect alone decides: a ticket must look
like one whose three messages were handled once each, in order.
"""
