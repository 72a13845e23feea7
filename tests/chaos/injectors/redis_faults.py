"""Faults of Redis: killed and started again, set back in time, full, emptied under our feet."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from tests.chaos.injectors.programs import SLACK_S
from tests.chaos.rig.cluster import Cluster
from tests.chaos.rig.facts import GROUP
from tests.chaos.rig.processes import continue_process, stop_process
from tests.chaos.rig.producer import STREAM
from tests.chaos.rig.records import now_ns
from tests.chaos.rig.wire import mapping

#: Pauses between tries to connect again grow up to this (common/runtime/service.py); part of the bound after Redis was
#: away.
_LONGEST_PAUSE_S = 2.0
#: A lease that is longer than any that was given is noticed within (master/membership/registry.py).
_LONG_LEASE_NOTICED_S = 15.0
#: A replica is not so far behind.
_BEHIND_NS = 1_000_000_000
#: A call on a connection that is dead, and does not say so, ends after so long (common/redis/client.py).
_CALL_TIMEOUT_S = 5.0


def kill_redis(cluster: Cluster, down_s: float, silent: bool = False) -> None:
    """kill -9, and start again on the same data after ``down_s``. ``silent``: a child that rewrites or saves keeps the
    clients' connections open, so nobody is told that they are dead."""
    t0 = now_ns()
    cluster.redis.kill()
    time.sleep(down_s)
    cluster.redis.start()
    _note_away(cluster, "kill_redis", t0, _CALL_TIMEOUT_S if silent else 0.0)


def pause_redis(cluster: Cluster, seconds: float) -> None:
    """SIGSTOP: every call hangs, and leases end meanwhile."""
    t0 = now_ns()
    stop_process(cluster.redis.pid)
    try:
        time.sleep(seconds)
    finally:
        continue_process(cluster.redis.pid)
    _note_away(cluster, "pause_redis", t0)


def rewrite_aof(cluster: Cluster, kill_within: bool) -> None:
    """Rewrite the append-only file, in one of its two forms, and kill the server: in the middle, or when it is done."""
    ask = cluster.state.call
    ask("CONFIG", "SET", "rdb-key-save-delay", "25000")  # microseconds for each key: it lasts long enough to be hit
    ask("CONFIG", "SET", "aof-use-rdb-preamble", cluster.rng.choice(("yes", "no")))
    ask("BGREWRITEAOF")
    until_s = time.monotonic() + (cluster.rng.uniform(0.05, 0.25) if kill_within else 3.0)
    while (runs := _is_rewriting(cluster)) and time.monotonic() < until_s:
        time.sleep(0.01)
    if not kill_within and not runs:
        cluster.counts["aof_rewrites"] += b"aof_last_bgrewrite_status:ok" in ask("INFO", "persistence")
        time.sleep(cluster.rng.uniform(0.0, 0.3))
    cluster.counts["killed_in_rewrite"] += runs
    kill_redis(cluster, cluster.rng.uniform(0.0, 0.3), silent=runs)


def _is_rewriting(cluster: Cluster) -> bool:
    told = cluster.state.call("INFO", "persistence")
    return b"aof_rewrite_in_progress:1" in told or b"aof_rewrite_scheduled:1" in told


def step_clock(cluster: Cluster, seconds: int) -> None:
    """Set the clock of Redis. Forward all leases end at once; back, they last longer by as much, until somebody
    notices."""
    assert cluster.redis.clock is not None
    t0 = now_ns()
    cluster.redis.clock.step(seconds)
    kind = "clock_forward" if seconds > 0 else "clock_back"
    noticed_s = _LONGEST_PAUSE_S if seconds > 0 else _LONG_LEASE_NOTICED_S
    bound_s = 2 * cluster.shape.lease_s + SLACK_S + noticed_s
    cluster.fault(kind, t0, now_ns(), "", "service", bound_s=bound_s)


def pause_clients(cluster: Cluster, seconds: float) -> None:
    """CLIENT PAUSE: writes, or all commands, wait."""
    t0 = now_ns()
    cluster.state.call("CLIENT", "PAUSE", str(int(seconds * 1000)), cluster.rng.choice(("WRITE", "ALL")))
    cluster.state.call("HDEL", "chaos-probe", "none")  # a write that changes nothing
    cluster.counts["held_calls"] += now_ns() - t0 > 0.8e9 * seconds
    _note_away(cluster, "client_pause", t0)


def kill_clients(cluster: Cluster) -> None:
    """CLIENT KILL of every connection but ours, in the middle of whatever it does."""
    t0 = now_ns()
    for kind in ("normal", "pubsub"):
        cluster.counts["killed_clients"] += int(cluster.state.call("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes"))
    _note_away(cluster, "client_kill", t0)


def lose_power(cluster: Cluster, tail_s: float) -> None:
    """The disk has what was there ``tail_s`` before the end."""
    t0 = now_ns()
    cluster.redis.copy_data()
    time.sleep(tail_s)
    cluster.redis.lose_power()
    accepted = cluster.producer.all_accepted()  # in the order of acceptance, all before the crash
    cluster.redis.start()
    _declare_lost(cluster, accepted, t0, "power loss")
    _note_away(cluster, "power_loss", t0)


def fail_over(cluster: Cluster, gently: bool) -> None:
    """A replica takes over; what it did not have is lost."""
    cluster.redis.replicate()
    t0 = now_ns()
    if gently:
        cluster.redis.hand_over()
    cluster.redis.kill()
    accepted = cluster.producer.all_accepted()
    cluster.redis.promote()
    if not gently:
        _declare_lost(cluster, accepted, t0 - _BEHIND_NS, "failover")
    _note_away(cluster, "failover_gently" if gently else "failover", t0)


def _declare_lost(cluster: Cluster, accepted: Mapping[str, int], since: int, why: str) -> None:
    kept = {_uid(flat) for _, flat in cluster.state.call("XRANGE", STREAM, "-", "+")}
    lost = [uid for uid, t in accepted.items() if t >= since and uid not in kept]
    if lost:
        uids = [*accepted]
        cluster.counts["lost_in_the_middle"] += len(uids) - uids.index(lost[0]) - len(lost)
    # What was sent while the copy was made, or whose answer never came, may be gone too; what was accepted before may
    # not.
    unsure = [uid for uid in set(cluster.tail.uids.values()) - kept if uid not in cluster.producer.accepted]
    cluster.history.write("lost", uids=[*lost, *unsure], why=why)
    cluster.counts["lost_tail"] += len(lost)


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
    bound_s = cluster.shape.leader_lease_s + SLACK_S + _LONGEST_PAUSE_S
    cluster.fault("full", t0, now_ns(), "", "service", since=now_ns(), bound_s=bound_s)


def delete_lease(cluster: Cluster, name: str) -> None:
    """DEL of a living consumer's lease: the leader takes over at once, and the consumer learns of it at its next call
    only."""
    for incarnation in cluster.state.living():
        if incarnation.startswith(name + ":"):
            t0, who = now_ns(), cluster.program(name).who
            cluster.state.call("DEL", f"{cluster.state.prefix}lease:{incarnation}")
            until = t0 + int(cluster.shape.lease_s * 1e9)
            cluster.fault("lease_deleted", t0, until, who, "tickets", bound_s=cluster.shape.lease_s + SLACK_S)


def delete_consumer(cluster: Cluster, name: str = "") -> str:
    """XGROUP DELCONSUMER with all that is pending for this name; without one, for the consumer that has most. Return
    whose it was."""
    kind = name or "owner"
    if not name:
        pending = {who: count for who, count in cluster.state.pending_by_name().items() if ":" in who}
        name = max(pending, key=pending.__getitem__, default="nobody")
    call, stream = cluster.state.call, cluster.state.stream
    call("MULTI")
    call("HGETALL", f"{cluster.state.prefix}tickets")
    call("XPENDING", stream, GROUP, "-", "+", "1000000", name)
    call("XRANGE", stream, "-", "+")
    call("XGROUP", "DELCONSUMER", stream, GROUP, name)
    records, pending, entries, count = call("EXEC")
    cluster.counts[f"deleted_{kind}"] += int(count)
    if name == "master":
        _declare_known_to_redis_only(cluster, mapping(records), {row[0] for row in pending}, entries)
    return name


def _declare_known_to_redis_only(
    cluster: Cluster, records: dict[bytes, bytes], pending: set[bytes], entries: list[Any]
) -> None:
    """Declare as deleted what came for a halted ticket after it had halted: it stands nowhere but under ``master``."""
    lost = []
    for entry_id, flat in entries:
        owner, _, ids = records.get(mapping(flat)[b"ticket_id"], b"").partition(b" ")
        if entry_id in pending and owner in (b"halted", b"returned") and entry_id not in ids.split():
            lost.append(_uid(flat))
    cluster.counts["known_to_redis_only"] += len(lost)
    cluster.history.write("deleted", uids=lost, why="DELCONSUMER of master, ticket halted")


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


def cut_by_producer(cluster: Cluster, keep: int) -> None:
    """A producer's XADD with MAXLEN: all but the newest entries are cut, read or not."""
    done = _done(cluster)
    unread, read = cluster.producer.send_cutting("CUT", keep, GROUP)
    known = cluster.tail.uids | cluster.producer.mids
    for name, ids in (("unread", unread), ("pending", read)):
        uids = [known[mid] for mid in ids if mid in known and known[mid] not in done]
        cluster.history.write("deleted", uids=uids, why=f"MAXLEN, {name}")
        cluster.counts[f"cut_{name}"] += len(uids)


def flush_all(cluster: Cluster) -> None:
    """FLUSHALL: streams, group, leases, everything. Whatever was not finished is lost; what comes later is not."""
    t0, done = now_ns(), _done(cluster)
    cluster.state.call("FLUSHALL")
    _declare_unfinished(cluster, done, "FLUSHALL")
    cluster.fault("flush_all", t0, now_ns(), "", "service", bound_s=cluster.shape.lease_s + SLACK_S + _LONGEST_PAUSE_S)


def destroy_group(cluster: Cluster) -> None:
    """XGROUP DESTROY: the entries stay, who has what is forgotten."""
    t0 = now_ns()
    cluster.state.call("XGROUP", "DESTROY", cluster.state.stream, GROUP)
    cluster.fault(
        "destroy_group", t0, now_ns(), "", "service", bound_s=cluster.shape.lease_s + SLACK_S + _LONGEST_PAUSE_S
    )


def destroy_source_groups(cluster: Cluster, most: int) -> None:
    """XGROUP DESTROY at some sources: how far they were gathered stands elsewhere too."""
    for source in cluster.rng.sample(cluster.producer.load.streams, most):
        cluster.counts["destroyed_source_groups"] += int(cluster.state.call("XGROUP", "DESTROY", source, GROUP))


def delete_sources(cluster: Cluster, most: int) -> None:
    """DEL of some sources. What was gathered before is in the work stream, and stays; the rest is lost."""
    sources = cluster.rng.sample(cluster.producer.load.streams, most)
    done = _done(cluster)
    cluster.counts["deleted_sources"] += int(cluster.state.call("DEL", *sources))
    accepted = set(cluster.producer.all_accepted())
    kept = {
        f"{fields[b'usher_from'].split(b' ', 2)[2].decode()}/{fields[b'uid'].decode()}"
        for fields in (mapping(flat) for _, flat in cluster.state.call("XRANGE", cluster.state.stream, "-", "+"))
    }
    for source in sources:  # what came since stays, and so do the others
        kept |= {f"{source}/{_uid(flat)}" for _, flat in cluster.state.call("XRANGE", source, "-", "+")}
    lost = {uid for uid in accepted - kept - done if uid.partition("/")[0] in sources}
    cluster.history.write("deleted", uids=sorted(lost), why="DEL of sources")


def _note_away(cluster: Cluster, kind: str, t0: int, more_s: float = 0.0) -> None:
    bound_s = cluster.shape.lease_s + SLACK_S + _LONGEST_PAUSE_S + more_s
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
