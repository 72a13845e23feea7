"""Faults of programs: killed, paused, asked to end. Each is noted in the history with the bound within which it must be
over."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from tests.chaos.rig.cluster import Cluster
from tests.chaos.rig.processes import continue_process, stop_process
from tests.chaos.rig.records import now_ns

#: What may pass beyond a lease until a ticket goes on: looking at leases, taking back, handing over, the handler, the
#: machine.
SLACK_S = 1.0


def kill_consumer(cluster: Cluster, name: str, forget_lock: bool = False, busy_s: float = 0.0) -> None:
    """kill -9 of the working process. ``forget_lock``: its successor cannot prove that it is dead, as on another host.
    ``busy_s``: for how long the others may have no room for what it had."""
    program = cluster.program(name)
    if not program.worker:
        return
    lock = cluster.folder / "state" / "locks" / f"{name}.lock"
    if forget_lock and lock.exists():
        lock.unlink()
        lock.touch(0o600)  # now, while the old one is held: else its number would be given to the new one
        cluster.counts["unproven_kills"] += 1
    who, t = program.who, now_ns()
    cluster.restarter.kill(program.worker, who)
    cluster.fault("kill", t, t, who, "tickets", bound_s=cluster.shape.lease_s + SLACK_S + busy_s)


def kill_program(cluster: Cluster, name: str) -> None:
    """kill -9 of a consumer's worker and of the process above it: another program is started in its place."""
    program = cluster.program(name)
    if program.process is not None and program.worker:
        who, t = program.who, now_ns()
        cluster.restarter.kill(program.process.pid)
        cluster.restarter.kill(program.worker, who)
        cluster.fault("kill", t, t, who, "tickets", bound_s=cluster.shape.lease_s + SLACK_S)


def kill_arbiter(cluster: Cluster, name: str) -> None:
    """kill -9 of the process that looks after the worker; the worker notices and ends by itself."""
    program = cluster.program(name)
    if program.process is not None:
        t = now_ns()
        cluster.restarter.kill(program.process.pid)
        cluster.fault("kill_arbiter", t, t, program.who)


def pause(cluster: Cluster, names: Sequence[str], seconds: float, recover: str = "tickets") -> None:
    """SIGSTOP for ``seconds``, then SIGCONT: what goes on then is a zombie if the pause was longer than its lease. The
    arbiter is stopped too, as where a machine is paused; it would end a worker that stands still alone."""
    began = []
    for name in names:
        program = cluster.program(name)
        if program.worker and program.process is not None:
            began.append(((program.process.pid, program.worker), program.who, now_ns()))
            for pid in began[-1][0]:
                stop_process(pid)
    try:
        time.sleep(seconds)
    finally:
        lease_s = cluster.shape.lease_s if recover == "tickets" else cluster.shape.leader_lease_s
        for pids, who, t0 in began:
            for pid in pids:
                continue_process(pid)
            cluster.fault("pause", t0, now_ns(), who, recover if seconds > lease_s else "", bound_s=lease_s + SLACK_S)


def block_logs(cluster: Cluster, seconds: float) -> None:
    """Nobody reads what the programs log, for so long; handlers log much meanwhile."""
    t0, before = now_ns(), cluster.sink.count()
    pipes = [program.pipe for program in cluster.restarter.programs.values() if program.pipe is not None]
    for pipe in pipes:
        pipe.block()
    try:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            for _ in cluster.consumer_names:
                cluster.producer.send(f"N{cluster.rng.randrange(30)}", log_lines="20")
            time.sleep(0.2)
        cluster.counts["full_log_pipes"] += sum(pipe.is_full for pipe in pipes)
        cluster.counts["effects_while_blocked"] += cluster.sink.count() - before
    finally:
        for pipe in pipes:
            pipe.go_on()
    cluster.fault("logs_blocked", t0, now_ns())


def find_leader(cluster: Cluster, within_s: float = 3.0) -> str:
    """The name of the master that leads; waits a while for one."""
    until_s = time.monotonic() + within_s
    while not (name := cluster.leader()) and time.monotonic() < until_s:
        time.sleep(0.02)
    return name


def kill_leader(cluster: Cluster, standby: bool = False) -> None:
    """kill -9 of the leader's working process; ``standby``: of that of a master that does not lead: what it gathered
    others must gather when its share has ended."""
    leader, kind = find_leader(cluster), "kill_standby" if standby else "kill_leader"
    masters = [name for name in cluster.master_names if (name != leader) == standby and cluster.program(name).worker]
    if leader and masters:
        t = now_ns()
        cluster.restarter.kill(cluster.program(masters[0]).worker, cluster.program(masters[0]).who)
        cluster.fault(kind, t, t, masters[0], "service", bound_s=cluster.shape.leader_lease_s + SLACK_S)


def pause_leader(cluster: Cluster, seconds: float) -> None:
    """SIGSTOP of the leader for longer than its lease."""
    name = find_leader(cluster)
    if name:
        cluster.counts["pause_leader"] += 1
        pause(cluster, [name], seconds, "service")


def restart_gently(cluster: Cluster, name: str) -> bool:
    """SIGTERM, wait for the end, start again. Whether it ended in time."""
    t0 = now_ns()
    ended = cluster.restarter.terminate(name, cluster.shape.drain_s + 6)
    cluster.program(name).wanted = True
    cluster.fault("restart", t0, now_ns(), name)
    return ended


def wait_until_back(cluster: Cluster, name: str, within_s: float = 15.0) -> None:
    """Until a consumer lives again, or a master answers."""
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        with contextlib.suppress(Exception):
            if name in cluster.master_names:
                if cluster.program(name).worker:
                    return
            elif any(incarnation.startswith(name + ":") for incarnation in cluster.state.living()):
                return
        time.sleep(0.02)


def at_work(cluster: Cluster, count: int, within_s: float = 0.3) -> list[str]:
    """So many consumers that have something in processing right now: a fault of an idle one shows nothing. The seed
    decides among equals."""
    names = cluster.rng.sample(cluster.consumer_names, len(cluster.consumer_names))
    until_s = time.monotonic() + within_s
    while True:
        pending = cluster.state.pending_by_name()
        busy = {name: sum(size for owner, size in pending.items() if owner.partition(":")[0] == name) for name in names}
        chosen = sorted(names, key=lambda name: busy[name] < 2)[:count]
        if all(busy[name] >= 2 for name in chosen) or time.monotonic() > until_s:
            return chosen
