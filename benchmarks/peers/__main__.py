"""``python -m benchmarks.peers NAME fill|work [NUMBER]``: the program in a peer's own interpreter. The folder of the
job is in the environment.

A worker says "ready" and waits for a line, so that all begin at the same time.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from benchmarks.peers.catalog import PEERS
from benchmarks.rig.recording import FOLDER_VARIABLE, PeerJob


def main(name: str, what: str, place: str = "0") -> None:
    job = PeerJob.load(Path(os.environ[FOLDER_VARIABLE]), int(place))
    if what == "fill":
        _write_peer_reply(PEERS[name].fill(job) or "")
        return
    run = PEERS[name].worker(job)
    _write_peer_reply("ready")
    sys.stdin.readline()
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # its output is not read
    run()


def _write_peer_reply(word: str) -> None:
    sys.stdout.write(word + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
