"""Faults of Redis: killed and started again, set back in time, full, emptied under our feet."""

from __future__ import annotations

import time
from typing import Any

from tests.chaos.injectors.programs import SLACK_S
from tests.chaos.rig.cluster import Cluster
from tests.chaos.rig.facts import GROUP, PREFIX
from tests.chaos.rig.processes import continue_process, stop_process
from tests.chaos.rig.producer import STREAM
from tests.chaos.rig.records import now_ns

#: Pauses between tries to connect again grow up to this (common/runtime/service.py); part of the bound after Redis was
#: away.
_LONGEST_PAUSE_S = 2.0


def kill_redis(cluster: Cluster, down_s: float) -> None:
    """kill -9, and start again on the same data after ``down_s``."""
    t0 = now_ns()
    cluster.redis.kill()
    time.sleep(down_s)
    cluster.redis.start()
    _note_away(cluster, "kill_redis", t0)


def pause_redis(cluster: Cluster, seconds: float) -> None:
    """SIGSTOP: every call hangs, and leases end meanwhile."""
    t0 = now_ns()
    stop_process(cluster.redis.pid)
    try:
        time.sleep(seconds)
    finally:
        continue_process(cluster.redis.pid)
    _note_away(cluster, "pause_redis", t0)


def lose_power(cluster: Cluster, tail_s: float) -> int:
    """The disk has what was there ``tail_s`` before the end. Declares what is lost by that; gives the number of
    messages."""
    t0 = now_ns()
    cluster.redis.copy_data()
    time.sleep(tail_s)
    cluster.redis.lose_power()
    accepted = list(cluster.producer.all_accepted().items())  # in the order of acceptance, all before the crash
    cluster.redis.start()
    kept = {_uid(flat) for _, flat in cluster.state.call("XRANGE", STREAM, "-", "+")}
    lost = [uid for uid, t in accepted if t >= t0 and uid not in kept]
    if lost:
        since_first = [uid for uid, _ in accepted[[uid for uid, _ in accepted].index(lost[0]) :]]
        cluster.counts["lost_in_the_middle"] += len(since_first) - len(lost)
    # What was sent while the copy was made, or whose answer never came, may be gone too; what was accepted before may
    # not.
    unsure = [uid for uid in set(cluster.tail.uids.values()) - kept if uid not in cluster.producer.accepted]
    cluster.history.write("lost", uids=[*lost, *unsure], why="power loss")
    _note_away(cluster, "power_loss", t0)
    return len(lost)


def fill_memory(cluster: Cluster, seconds: float) -> None:
    """No memory for anything new. What frees memory must go on."""
    t0 = now_ns()
    cluster.state.call("CONFIG", "SET", "maxmemory", "1")
    before = cluster.sink.count()
    try:
        time.sleep(seconds)
    finally:
        cluster.state.call("CONFIG", "SET", "maxmemory", "0")
    cluster.counts["effects_while_full"] += cluster.sink.count() - before
    cluster.fault(
        "full",
        t0,
        now_ns(),
        "",
        "service",
        since=now_ns(),
        bound_s=cluster.shape.leader_lease_s + SLACK_S + _LONGEST_PAUSE_S,
    )


def delete_lease(cluster: Cluster, name: str) -> None:
    """DEL of a living consumer's lease: the leader takes over at once, and the consumer learns of it at its next call
    only."""
    for incarnation in cluster.state.living():
        if incarnation.startswith(name + ":"):
            t0, who = now_ns(), cluster.program(name).who
            cluster.state.call("DEL", f"{PREFIX}lease:{incarnation}")
            until = t0 + int(cluster.shape.lease_s * 1e9)
            cluster.fault("lease_deleted", t0, until, who, "tickets", bound_s=cluster.shape.lease_s + SLACK_S)


def flush_scripts(cluster: Cluster) -> None:
    cluster.state.call("SCRIPT", "FLUSH")
    cluster.counts["script_flushes"] += 1


def delete_pending(cluster: Cluster, most: int, owner: str = "") -> None:
    """XDEL of entries that are pending at the moment, for ``owner`` if one is given."""
    ids = [row[0] for row in cluster.state.call("XPENDING", STREAM, GROUP, "-", "+", most, *([owner] if owner else []))]
    _delete(cluster, ids, "XDEL of pending entries")


def trim_all(cluster: Cluster) -> None:
    """XTRIM MAXLEN 0: what is pending and what was never read is gone."""
    done = _done(cluster)
    cluster.state.call("XTRIM", STREAM, "MAXLEN", "0")
    _declare_unfinished(cluster, done, "XTRIM")


def flush_all(cluster: Cluster) -> None:
    """FLUSHALL: streams, group, leases, everything. Whatever was not finished is lost; what comes later is not."""
    t0, done = now_ns(), _done(cluster)
    cluster.state.call("FLUSHALL")
    _declare_unfinished(cluster, done, "FLUSHALL")
    cluster.fault("flush_all", t0, now_ns(), "", "service", bound_s=cluster.shape.lease_s + SLACK_S + _LONGEST_PAUSE_S)


def destroy_group(cluster: Cluster) -> None:
    """XGROUP DESTROY: the entries stay, who has what is forgotten."""
    t0 = now_ns()
    cluster.state.call("XGROUP", "DESTROY", STREAM, GROUP)
    cluster.fault(
        "destroy_group", t0, now_ns(), "", "service", bound_s=cluster.shape.lease_s + SLACK_S + _LONGEST_PAUSE_S
    )


def _note_away(cluster: Cluster, kind: str, t0: int) -> None:
    bound_s = cluster.shape.lease_s + SLACK_S + _LONGEST_PAUSE_S
    cluster.fault(kind, t0, now_ns(), "", "service", since=now_ns(), bound_s=bound_s)


def _delete(cluster: Cluster, ids: list[bytes], why: str) -> None:
    uids = [cluster.tail.uids.get(entry_id.decode(), "") for entry_id in ids]
    known = [(entry_id, uid) for entry_id, uid in zip(ids, uids, strict=True) if uid]
    if known:
        cluster.history.write("deleted", uids=[uid for _, uid in known], why=why)
        cluster.counts["deleted_pending"] += int(
            cluster.state.call("XDEL", STREAM, *(entry_id for entry_id, _ in known))
        )


def _done(cluster: Cluster) -> set[str]:
    """What has its effect: to be asked before what is not done is lost. A handler that runs meanwhile may write its
    effect and then be ended with its process before it returns; nobody runs that message again."""
    return {commit["uid"] for commit in cluster.sink.commits()}


def _declare_unfinished(cluster: Cluster, done: set[str], why: str) -> None:
    """All that was accepted, is not in the stream any more, and was not ``done`` before, is excused."""
    accepted = set(cluster.producer.all_accepted())
    kept = {_uid(flat) for _, flat in cluster.state.call("XRANGE", STREAM, "-", "+")}
    cluster.history.write("deleted", uids=sorted(accepted - kept - done), why=why)


def _uid(flat: list[Any]) -> str:
    for at in range(0, len(flat), 2):
        if flat[at] == b"uid":
            return str(flat[at + 1].decode())
    return ""
