"""The doctor: is this Redis, as it is set up and as it is now, one on which the promise holds?

``facts`` is what can be known, ``collector`` asks Redis for it. ``server``, ``topology`` and ``stream`` judge it, and
``findings`` puts their judgements together: pure functions, facts in, findings out. What could not be asked (a managed
Redis may forbid CONFIG) is told as unknown and never as fine.
"""
