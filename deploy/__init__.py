"""Run the programs: on this machine, in a demo, under supervisord. Knows both programs, and holds the deployment's
files."""

from __future__ import annotations

if __name__ != "usher.deploy":
    raise ImportError(
        f"{__name__!r} was imported from Usher's own folder, where it is 'usher.deploy': leave the checkout's folder,"
        " or take it off the path"
    )
