"""What ``python -m benchmarks compare`` measures beside Usher: one file for each, with what it promises, how it is
filled, and how a worker of it runs.

Each runs as the fast set-up that its own documentation recommends, in processes of its own, and in a virtual
environment of its own where there is one, because their requirements contradict each other and Usher's. So a peer's
library is imported inside of the functions only.
"""
