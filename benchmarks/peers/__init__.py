"""The peers that ``python -m benchmarks compare`` measures beside Usher: one file for each, with its promise, its fill,
and its worker.

Each runs as the fast set-up that its own documentation recommends, in processes of its own, and in a virtual
environment of its own where there is one, because their requirements contradict each other and Usher's. So a peer's
library is imported only inside functions.
"""
