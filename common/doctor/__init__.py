"""The doctor: judges whether the promise holds on this Redis, as it is set up and as it is now.

``collector`` asks, ``judgements`` makes findings of it. What Redis refuses to tell is unknown, and never fine."""
