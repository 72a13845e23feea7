"""Fault injection on real processes, judged by an independent checker.

::

    rig/        starts a redis-server, masters, consumers, a producer and a sink, and writes the history of what they did
    injectors/  what goes wrong: signals, a TCP proxy on every link, a Redis that dies, loses its tail, fills up, is emptied
    checker/    reads a history and says what of the promise was broken; knows nothing of Usher
    system_a/   the system that Usher was built from, taken literally: the harness must be seen to fail
    plans/      the scenarios K0..K22: faults, and what must have happened for a run to count
"""
