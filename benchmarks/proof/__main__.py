"""A program of the benchmark: one session, and a proof for each line of its input (``step``, or ``again``: of all that
is archived). Answers with a line of JSON each."""

from __future__ import annotations

import os
import sys

import orjson

from usher.common.redis.locate import resolve_redis_url
from usher.common.runtime.settings import load
from usher.master.audit.cli import session
from usher.master.audit.job import Proof
from usher.master.audit.settings import AuditChoices, AuditSettings


def main() -> None:
    settings = AuditChoices(**load(AuditSettings, os.environ).model_dump(), memory_mib=int(sys.argv[1]))
    url, [stream] = resolve_redis_url(settings), settings.streams
    with session(settings, url, local=True) as (made, reading):
        print(orjson.dumps({"ready": True}).decode(), flush=True)
        for line in sys.stdin:
            proof = Proof(made, settings, stream, settings.folder / "archive", reading)
            proof.run(again=line.strip() == "again")
            found = [(one.check.name, example.id) for one in proof.fresh for example in one.examples]
            told = {"total": proof.span["executions"], "new": proof.executions, "unproven": proof.unproven}
            if line.strip() != "again":
                with (settings.folder / "told").open("ab") as out:  # one that is killed may tell it again
                    out.writelines(orjson.dumps(one) + b"\n" for one in found)
                proof.commit()
            print(orjson.dumps(told | {"standing": len(proof.standing), "run": proof.number}).decode(), flush=True)


if __name__ == "__main__":
    main()
