"""The commands of ``usher`` that belong to neither program: up, demo, send, bench. ``usher.cli`` imports them when they
are called.

``up`` and ``demo`` run the same way: ``preflight`` looks at everything that can be wrong, ``supervision`` runs
supervisord with ``deploy/supervisord.conf`` as a child and is the only one that starts, watches and ends processes,
``leader`` asks the masters over HTTP whether all are well, ``relay`` shows what the programs log.
"""
