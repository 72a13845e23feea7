"""The doctor: judges whether the promise holds on this Redis, as it is set up and as it is now.

``facts`` defines what can be known, ``collector`` asks Redis for it, ``judgements`` makes findings of it. A question
that Redis refuses (a managed Redis may forbid CONFIG) is reported as unknown and never as fine.
"""
