"""``deploy/users.acl`` on a real Redis: a whole system works under its users, and whatever else they try is NOPERM."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.commands import usher
from tests.process.crew import KEYS, Crew, out_of_order
from tests.process.machine import USHER, environ_for, until
from tests.tuned import tuned
from usher.common.base.errors import GroupMissing, NotNow
from usher.common.protocol.keys import LogKeys, uid_key
from usher.common.redis.acl import AclProgram, acl_file, commands_of, programs, scripts_for_others
from usher.common.redis.client import CommandRefused, Link
from usher.common.redis.embedded import find_redis_server, free_port, version_below_7
from usher.common.sending.producer import Producer

pytestmark = pytest.mark.process

_ROOT = Path(__file__).resolve().parents[2]
_FILE = _ROOT / "deploy" / "users.acl"
_ALL = {program.name: program for program in programs(KEYS.stream, KEYS.group)}
#: Redis 6.2 knows no rights by key.
_BY_KEY = version_below_7(find_redis_server()) is None
_HANDLERS = """
from pathlib import Path
from usher.deploy.demo.handlers import record
from usher.common.base.errors import GiveUp


def handle(message):
    if "broken" in message.fields and not Path("repaired").exists():
        raise GiveUp("it is broken")
    record(message)
"""
#: What a start looks at, if it may: `usher doctor` is for the rest.
_MAY_BE_REFUSED = {"client", "config", "config|get", "pubsub", "pubsub|numsub", "client|setinfo"}


class Guarded:
    """A redis-server with the users of ``deploy/users.acl``, each with its own name as password, and one more for the
    test."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self.port = port
        self.admin = Link(self.url("admin"), "test")

    def url(self, user: str) -> str:
        return f"redis://{user}:pw-{user}@127.0.0.1:{self.port}/0"

    def link(self, user: str) -> Link:
        return Link(self.url(user), "test")

    def refused(self) -> set[str]:
        """What has been refused to anybody."""
        found = set()
        for entry in self.admin.call("ACL", "LOG", 100):
            told = dict(zip(entry[::2], entry[1::2], strict=True))
            found.add(f"{told[b'username'].decode()}: {told[b'reason'].decode()} {told[b'object'].decode()}")
        return found


@contextmanager
def guarded_redis(folder: Path) -> Iterator[Guarded]:
    text = _FILE.read_text() if _BY_KEY else acl_file(KEYS.stream, KEYS.group, selectors=False)
    lines = re.sub(r"^user (\w+) off resetpass (?=.*\+\w)", r"user \1 on >pw-\1 ", text, flags=re.MULTILINE)
    users = [line for line in lines.splitlines() if line.startswith("user ")] + ["user admin on >pw-admin ~* &* +@all"]
    assert len(users) == len(_ALL) + 2
    (folder / "users.acl").write_text(lines + users[-1] + "\n")
    port = free_port()
    (folder / "redis.conf").write_text(
        f"port {port}\nbind 127.0.0.1\ndir {folder}\nappendonly no\ninclude {folder}/users.acl\n"
    )
    words = [str(find_redis_server()), str(folder / "redis.conf")]
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    server = Guarded(folder, port)
    try:
        until(lambda: _answers(server.admin), 20, "Redis answers")
        yield server
    finally:
        server.admin.close()
        process.kill()
        process.wait(10)


def _answers(link: Link) -> bool:
    try:
        return bool(link.call("PING") == b"PONG")
    except NotNow:
        return False


@pytest.fixture(scope="module")
def guarded() -> Iterator[Guarded]:
    with tempfile.TemporaryDirectory(prefix="usher-t-", dir="/tmp") as name, guarded_redis(Path(name)) as server:
        yield server


@pytest.fixture
def emptied(guarded: Guarded) -> Guarded:
    guarded.admin.pipeline([("FLUSHALL",), ("ACL", "LOG", "RESET")])
    return guarded


# ---- the file ----


def test_the_file_is_what_the_command_prints() -> None:
    assert _FILE.read_text() == acl_file(KEYS.stream, KEYS.group), "run: usher acl > deploy/users.acl"


_RUN = re.compile(r'\b_?(?:run|run_each|try_each)\(\s*"([a-z_]+)"')


#: The rooms of a master's program.
_LEADS = (
    "assembly", "dispatch", "insight", "leader", "membership", "messages", "operations", "recovery", "sources", "web",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("consumer", ["consumer/*.py", "consumer/lifecycle/*.py", "consumer/execution/*.py"]),
        (
            "master",
            [
                *(f"master/{room}/**/*.py" for room in _LEADS),
                *("common/doctor/collector.py", "master/verbs/view.py", "deploy/rehearsal/cli.py"),
            ],
        ),
        ("streamer", ["master/streamer/program.py", "master/leader/elector.py"]),
        ("sender", ["common/sending/producer.py"]),
        ("reader", ["common/outbox/*.py"]),
    ],
)
def test_a_program_has_the_scripts_that_its_code_runs(name: str, files: list[str]) -> None:
    texts = {file.relative_to(_ROOT).as_posix(): file.read_text() for pattern in files for file in _ROOT.glob(pattern)}
    used = {script for text in texts.values() for script in _RUN.findall(text)}
    # Chosen at run time, or run for it elsewhere.
    used |= {"register", "find_entries", "look_at_sources"} if name == "master" else set()
    with_sources = {program.name: program for program in programs("usher:{g}", "g", ("orders", "t:*"))}
    assert used == set(with_sources[name].scripts)


# ---- it is enough ----


def _usher(folder: Path, url: str, *words: str, code: int = 0) -> Any:
    done = subprocess.run(
        [*USHER, *words],
        env=environ_for(folder, USHER_REDIS_URL=url),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def test_a_whole_system_works_under_these_users(emptied: Guarded, tmp_path: Path) -> None:
    (tmp_path / "guarded.py").write_text(_HANDLERS)
    policy = {"USHER_DEAD_LETTER_POLICY": "halt"}
    producer = redis.Redis(port=emptied.port, username="producer", password="pw-producer", protocol=2)
    with Crew(tmp_path, emptied.url("master"), **tuned(TRIM_S=1)) as crew:
        crew.start(2, ["c1", "c2"], "guarded:handle", USHER_REDIS_URL=emptied.url("consumer"), **policy)
        sent = [
            producer.xadd(KEYS.stream, {"ticket_id": f"T{number % 11}", "body": "x"}).decode() for number in range(200)
        ]
        broken = producer.xadd(KEYS.stream, {"ticket_id": "B", "broken": "1"}).decode()
        behind = producer.xadd(KEYS.stream, {"ticket_id": "B"}).decode()
        unusable = producer.xadd(KEYS.stream, {"no": "ticket"})
        assert unusable
        crew.wait_until_handled(sent, 60)
        admin = emptied.admin
        crew.until(lambda: admin.call("XLEN", KEYS.dead) == 2, 30, "both dead letters are there")
        (tmp_path / "repaired").touch()
        _usher(tmp_path, emptied.url("master"), "dead", "redrive", "--all", "--ticket", "B", "--yes")
        crew.wait_until_handled([broken, behind], 30)
        # A crash, and what follows it: the successor notes it, the leader takes back.
        crew.kill_worker("c1")
        sent += [producer.xadd(KEYS.stream, {"ticket_id": f"T{number % 11}"}).decode() for number in range(100)]
        _usher(tmp_path, emptied.url("sender"), "send", "--ticket", "T1", "--wait", "text=more")
        crew.wait_until_handled(sent, 60)
        crew.wait_until_settled(admin)
        # For later: by hand, and by the command; one is dropped before it comes.
        producer.xadd(LogKeys(KEYS.stream).delayed, {"due_ms": "0", "ticket_id": "T1"})
        _usher(tmp_path, emptied.url("sender"), "send", "--ticket", "T1", "--after", "1h", "--dedup", "60", "uid=later")
        log = LogKeys(KEYS.stream)
        crew.until(lambda: admin.call("XLEN", log.delayed) == 1 == admin.call("ZCARD", log.due), 30, "one was sent")
        assert json.loads(_usher(tmp_path, emptied.url("master"), "delayed", "list", "--json"))["waiting"] == 1
        _usher(tmp_path, emptied.url("master"), "delayed", "drop", "--all", "--yes")
        crew.wait_until_settled(admin)
        assert json.loads(_usher(tmp_path, emptied.url("master"), "status", "--json"))["delayed"]["messages"] == 0
        assert json.loads(_usher(tmp_path, emptied.url("master"), "consumers", "list", "--json"))
        # The leader goes, the other adopts; a consumer drains and leaves for good.
        crew.kill_worker("master-1")
        assert crew.stop("c2") == 0
        last = [producer.xadd(KEYS.stream, {"ticket_id": f"T{number % 11}"}).decode() for number in range(50)]
        crew.wait_until_handled(last, 60)
        crew.wait_until_settled(admin)
        assert not out_of_order(crew.executions())
        assert {name for name, _ in _pairs(admin.call("HGETALL", KEYS.consumers))} == {b"c1"}
    producer.close()
    refused = emptied.refused()
    assert not {entry for entry in refused if entry.rpartition(" ")[2] not in _MAY_BE_REFUSED}


def _pairs(flat: list[bytes]) -> list[tuple[bytes, bytes]]:
    return list(zip(flat[::2], flat[1::2], strict=True))


@pytest.mark.slow
def test_a_rehearsal_needs_no_more_than_an_auditor_may(emptied: Guarded, tmp_path: Path) -> None:
    (tmp_path / "guarded.py").write_text("def handle(message): pass\n")
    admin = emptied.admin
    admin.call("XGROUP", "CREATE", KEYS.stream, KEYS.group, "0", "MKSTREAM")
    sent = [admin.call("XADD", KEYS.stream, "*", "ticket_id", "T").decode() for _ in range(2)]
    letter = admin.call(
        "XADD", KEYS.dead, "*", "usher-id", "1-1", "usher-ticket", "T", "usher-fields", "1", "ticket_id", "T"
    ).decode()
    admin.call("XREADGROUP", "GROUP", KEYS.group, "x", "COUNT", 1, "STREAMS", KEYS.stream, ">")
    admin.call("XACK", KEYS.stream, KEYS.group, sent[0])  # so that the run log and the letters are looked through
    for words in (("--ticket", "T"), ("--letter", letter, "--letter", "1-1", "--message", sent[0]), ("--error", "")):
        all_of = ("--all",) if words == ("--error", "") else ()
        assert json.loads(
            _usher(tmp_path, emptied.url("auditor"), "rehearse", "guarded:handle", *words, *all_of, "--yes", "--json")
        )["taken"]
    assert not {entry for entry in emptied.refused() if entry.rpartition(" ")[2] not in _MAY_BE_REFUSED}


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[str], Any]:
    """Return what `usher doctor` finds with this URL, by check."""

    def ask(url: str) -> Any:
        monkeypatch.setenv("USHER_REDIS_URL", url)
        usher("doctor", "--json")
        return {finding["check"]: finding for finding in json.loads(capsys.readouterr().out)["findings"]}

    return ask


@pytest.mark.skipif(not _BY_KEY, reason="ACL DRYRUN is of Redis 7")
@pytest.mark.parametrize("name", ["master", "consumer", "auditor", "streamer", "reader", "sender"])
def test_the_doctor_says_what_such_a_user_is_enough_for(
    emptied: Guarded, doctor: Callable[[str], Any], name: str
) -> None:
    """Of users for other programs than masters and consumers it said that they lack rights, and that parts of Usher
    cannot work."""
    emptied.admin.call("XGROUP", "CREATE", KEYS.stream, KEYS.group, "0", "MKSTREAM")
    found = doctor(emptied.url(name))
    assert found["rights"]["severity"] == "ok", found
    assert name in found["rights"]["seen"]


@pytest.mark.parametrize("name", ["master", "auditor"])
def test_the_doctor_sees_stream_leader_and_consumers_as_such_a_user(
    emptied: Guarded, doctor: Callable[[str], Any], name: str
) -> None:
    """It is what the runbook begins with, and USHER_REDIS_URL of a folder of init-deploy is that of the masters."""
    emptied.admin.call("XGROUP", "CREATE", KEYS.stream, KEYS.group, "0", "MKSTREAM")
    emptied.admin.call("XADD", KEYS.stream, "*", "ticket_id", "T")
    found = doctor(emptied.url(name))
    assert {check: found[check]["severity"] for check in ("stream", "ids", "leader", "consumers")} == {
        "stream": "ok", "ids": "ok", "leader": "bad", "consumers": "bad"
    }  # fmt: skip
    emptied.admin.call("DEL", KEYS.stream)
    emptied.admin.call("SET", KEYS.stream, "x")
    assert doctor(emptied.url(name))["stream"]["severity"] == "bad"
    emptied.admin.call("DEL", KEYS.stream)


@pytest.mark.skipif(not _BY_KEY, reason="ACL DRYRUN is of Redis 7")
def test_the_doctor_names_what_a_master_lacks_whose_user_is_of_a_former_version(
    emptied: Guarded, doctor: Callable[[str], Any]
) -> None:
    """It said that all was well, and that a consumer could work under it."""
    emptied.admin.call("ACL", "SETUSER", "master", "-zadd", "-zrangebyscore")
    try:
        rights = doctor(emptied.url("master"))["rights"]
    finally:
        emptied.admin.call("ACL", "SETUSER", "master", "+zadd", "+zrangebyscore")
    assert rights["severity"] == "bad"
    assert "user master may not run ZADD, ZRANGEBYSCORE" in rights["seen"]
    assert "usher acl" in rights["do"]


@pytest.mark.skipif(not _BY_KEY, reason="ACL DRYRUN is of Redis 7")
def test_the_doctor_names_what_an_auditor_lacks(emptied: Guarded, doctor: Callable[[str], Any]) -> None:
    line = _ALL["auditor"].line("pw-auditor", selectors=_BY_KEY)
    words = re.findall(r"\([^)]*\)|\S+", line)[2:]
    emptied.admin.call("ACL", "SETUSER", "auditor", "reset", *(word.replace("+set", "+get") for word in words))
    try:
        rights = doctor(emptied.url("auditor"))["rights"]
    finally:
        emptied.admin.call("ACL", "SETUSER", "auditor", "reset", *words)
    assert rights["severity"] == "bad"
    assert "user auditor may not run SET on all keys that an auditor of this version uses" in rights["seen"]


# ---- it is no more ----

#: Command, and the keys of another, for everybody but the administrator.
_FORBIDDEN = [
    *("FLUSHALL", "FLUSHDB", "KEYS *", "SCAN 0"),
    *("CONFIG GET *", "CONFIG SET maxmemory 1", "DEBUG SLEEP 0", "MODULE LIST", "SCRIPT FLUSH"),
    *("ACL LIST", "ACL SETUSER x", "ACL GETUSER admin", "SHUTDOWN NOSAVE"),
    *("MONITOR", "REPLICAOF NO ONE", "CLIENT KILL ID 1", "CLIENT LIST"),
    *("XGROUP DESTROY ticket_stream g", "XSETID ticket_stream 1-1", "RENAME ticket_stream x"),
    *("XADD other * a b", "GET other", "SET other 1"),
    *("DEL other", "XREAD STREAMS other 0", "SORT ticket_stream", "DUMP ticket_stream"),
    *("SWAPDB 0 1", "MIGRATE h 1 k 0 1", "SUBSCRIBE x", "PUBLISH x y"),
    *("CLUSTER RESET", "LATENCY RESET", "SLOWLOG GET", "BGSAVE", "MEMORY PURGE"),
]
#: Of users that have rights by key.
_BEYOND_THEIR_KEYS = {
    "consumer": [
        "EVAL return(1) 0",
        "SCRIPT LOAD return(1)",
        "XADD ticket_stream * a b",
        "XTRIM ticket_stream MAXLEN 0",
        "DEL ticket_stream",
        f"DEL {KEYS.tickets}",
        "SET ticket_stream x",
        f"HSET {KEYS.rules} a b",
        f"XTRIM {KEYS.dead} MAXLEN 0",
    ],
    "sender": ["EVAL return(1) 0", "SCRIPT LOAD return(1)", "SET ticket_stream x", "GET ticket_stream"],
    "streamer": [
        "EVAL return(1) 0",
        "SET ticket_stream x",
        "DEL ticket_stream",
        f"XADD {LogKeys(KEYS.stream, 'x').leader} * a b",
    ],
    "reader": ["EVAL return(1) 0", "HSET ticket_stream a b"],
    "auditor": ["EVAL return(1) 0", f"SET {KEYS.leader} x", f"HSET {KEYS.tickets} a b", f"HSET {KEYS.rules} a b"],
}
_SET_POSITION = "XGROUP SETID ticket_stream concurrency_stream_group $"
_OF_THE_GROUP = ("XRANGE ticket_stream - +", "XACK ticket_stream g 1-1", f"HGETALL {KEYS.tickets}")
_CHANGES = ("XADD ticket_stream * a b", "XACK ticket_stream g 1-1", "XTRIM ticket_stream MAXLEN 0")
_OF_OTHERS = {
    "consumer": [
        _SET_POSITION,
        f"GET {KEYS.leader}",
        f"SET {KEYS.leader} x",
        f"HSET {KEYS.prefix}counters fence 1",
        f"HGET {KEYS.position} x",
        f"HRANDFIELD {KEYS.errors} -9",  # or as many times as it says
        "XREVRANGE ticket_stream + -",
    ],
    "producer": [_SET_POSITION, *_OF_THE_GROUP, "EVAL x 0", "INFO", f"XADD {KEYS.dead} * a b", "CLIENT SETNAME x"],
    "sender": [_SET_POSITION, *_OF_THE_GROUP, f"XADD {KEYS.dead} * a b"],
    "streamer": [_SET_POSITION, *_OF_THE_GROUP, f"SET {KEYS.leader} x"],
    "reader": [_SET_POSITION, *_CHANGES, f"HGETALL {KEYS.tickets}"],
    "auditor": [_SET_POSITION, *_CHANGES, f"DEL {KEYS.tickets}"],
    "master": [
        "SET {ticket_stream}:streamer-outbox x",
        "SET {ticket_stream}:other:leader x",
        "XADD {other}:g:dead * a b",
    ],
}


def _client(guarded: Guarded, name: str) -> Any:
    """A connection that sends nothing by itself but its password."""
    return redis.Redis(
        port=guarded.port, username=name, password=f"pw-{name}", protocol=2, single_connection_client=True
    )


def _refusal(client: Any, *command: object) -> str:
    try:
        return f"was not refused: {client.execute_command(*command)!r}"
    except redis.exceptions.NoPermissionError:
        return ""
    except redis.RedisError as other:
        is_refused = "NOPERM" in str(other) or re.match(
            "(DEBUG|MODULE) command not allowed", str(other)
        )  # to anybody, since Redis 7
        return "" if is_refused else f"was refused otherwise: {other}"


def _known(server: Guarded) -> Iterator[tuple[str, int]]:
    """Each command that the server knows, and as many words as it wants at least; since Redis 7 also each
    ``command|subcommand``."""
    for name, arity, *_, in_it in server.admin.call("COMMAND"):
        of_it = in_it if in_it and isinstance(in_it[0], list) else ()
        yield from ((sub[0].decode(), abs(sub[1])) for sub in of_it)
        if not of_it:
            yield name.decode(), abs(arity)


@pytest.mark.parametrize("name", _ALL)
def test_what_a_user_must_not_do_is_noperm(emptied: Guarded, name: str) -> None:
    client = _client(emptied, name)
    beyond = _BEYOND_THEIR_KEYS.get(name, []) if _BY_KEY else []
    found = {text: _refusal(client, *text.split(" ")) for text in _FORBIDDEN + _OF_OTHERS[name] + beyond}
    client.close()
    assert not {text: why for text, why in found.items() if why}


@pytest.mark.parametrize("name", _ALL)
def test_every_other_command_of_the_server_is_noperm(emptied: Guarded, name: str) -> None:
    """All that the server knows, with as many words as each wants at least: rights are looked at before anything is
    done."""
    client = _client(emptied, name)
    allowed = {*_ALL[name].commands, *(() if _BY_KEY else ("eval",)), "auth", "hello", "quit", "reset"}
    containers = {command.partition("|")[0] for command in allowed}
    others = {
        command: words
        for command, words in _known(emptied)
        if command not in (allowed if "|" in command else containers)
    }
    assert len(others) > 150
    found = {
        command: _refusal(client, *command.split("|"), *["x"] * (words - 1 - command.count("|")))
        for command, words in others.items()
    }
    client.close()
    assert not {command: why for command, why in found.items() if why}


def test_a_script_gives_no_more_than_its_caller_has(emptied: Guarded) -> None:
    client = _client(emptied, "master")
    with pytest.raises(redis.RedisError, match="(?i)user|permission|acl"):
        client.execute_command("EVAL", "return redis.call('FLUSHALL')", 0)
    with pytest.raises(redis.RedisError, match="(?i)user|permission|acl"):
        client.execute_command("EVAL", "return redis.call('GET', 'other')", 0)
    client.close()


def test_a_program_may_run_all_commands_of_its_scripts() -> None:
    for program in _ALL.values():
        needed = {command for script in program.scripts for command in commands_of(script)}
        assert needed <= {*program.commands}, program.name


def _knows(emptied: Guarded, runner: Link, name: str) -> bool:
    return emptied.admin.call("SCRIPT", "EXISTS", runner.digest(name)) == [1]


@pytest.mark.skipif(not _BY_KEY, reason="Redis 6.2")
def test_a_user_without_eval_runs_what_a_master_has_loaded_and_says_what_it_waits_for(emptied: Guarded) -> None:
    """After SCRIPT FLUSH, a restart or a failover masters load the steps again."""
    emptied.admin.call("SCRIPT", "FLUSH")
    producer = Producer(Link(emptied.url("sender"), "test"), KEYS.stream, dedup_s=60, patience_s=0)
    with pytest.raises(NotNow, match="does not know step send.*a master"):
        producer.send("T", {"text": "x"}, uid="u")
    master = Link(emptied.url("master"), "test")
    assert master.load_for_others(scripts_for_others()) == []
    first = producer.send("T", {"text": "x"}, uid="u")
    assert producer.send("T", {"text": "x"}, uid="u") == first
    emptied.admin.call("SCRIPT", "FLUSH")
    until(lambda: master.load_for_others(scripts_for_others()) == [] and _knows(emptied, master, "send"), 10, "again")
    assert producer.send("T", {"text": "x"}, uid="u") == first
    emptied.admin.call("SCRIPT", "FLUSH")
    emptied.admin.call("ACL", "SETUSER", "master", "-script|load")
    until(lambda: master.load_for_others(scripts_for_others()), 10, "it is refused, and that is told")
    emptied.admin.call("ACL", "SETUSER", "master", "+script|load")
    until(lambda: not master.load_for_others(scripts_for_others()) and _knows(emptied, master, "send"), 10, "later")
    producer.close()


def test_nobody_works_as_default_and_nobody_logs_in_before_he_has_a_password(emptied: Guarded) -> None:
    for user, password in (("default", ""), (None, "x")):
        client = redis.Redis(
            port=emptied.port, username=user, password=password, protocol=2, retry=Retry(NoBackoff(), 0)
        )
        with pytest.raises(redis.AuthenticationError):
            client.ping()
        client.close()
    assert all(" off resetpass " in line for line in _FILE.read_text().splitlines() if line.startswith("user "))


def test_a_stream_with_signs_of_patterns_is_meant_literally() -> None:
    found: dict[str, AclProgram] = {program.name: program for program in programs("a*[b]", "g")}
    assert found["producer"].keys == (r"a\*\[b\]", r"{a\*\[b\]}:delayed")
    assert r"~{a\*\[b\]}:g:lease:*" in found["consumer"].line()


# ---- what they give to scripts ----

_WRONG = ("1e18", "1000000000000000000", "-1", "nan", "inf", "1e308", "0", "", "abc", "[1e18]", "[-1,2]")


def _samples(user: str) -> dict[str, tuple[list[str], list[str | int]]]:
    """Keys and arguments with which each script that a user may run does its work."""
    stream, log, me = KEYS.stream, LogKeys(KEYS.stream), "c:1"
    group, lease, replies = KEYS.group, KEYS.lease("c:1"), log.replies("a" * 32)
    lead: dict[str, tuple[list[str], list[str | int]]] = {
        "emit": ([stream, log.leader], ["7", 2, "ticket_id", "uid", "T", "a", "U", "b"]),
        "elect": ([log.leader, log.counters], ["here", 60_000, "7"]),
    }
    own: dict[str, tuple[list[str], list[str | int]]] = {
        "renew": ([lease, stream, KEYS.lease("c:2"), KEYS.changed], [group, me, 60_000, "-", 60_000]),
        "ack": (
            [stream, lease, KEYS.attempts, KEYS.runs, KEYS.errors, replies],
            [group, '{"ids":["1-1","2-1"]}', 100, "", "1-1", "2-1", "1-1", 7, "", "json", "null"],
        ),
        "dead_letter": (
            [stream, lease, KEYS.tickets, KEYS.dead, KEYS.attempts, KEYS.changed, KEYS.errors, KEYS.letters],
            [group, me, "U", "3-1", "gave_up", "", 1, 1, 2, 9, "", "", "skip", "", "", ""],
        ),
        "charge": (
            [stream, lease, KEYS.attempts, KEYS.runs, KEYS.errors, KEYS.failures],
            [group, me, "r", 9, 1, "1-1", "1 1 0 0", "", "", ""],
        ),
        "drain": ([lease, KEYS.changed], [me, 60_000]),
        "give_back": (
            [stream, lease, KEYS.tickets, KEYS.dead, KEYS.changed, KEYS.attempts, KEYS.letters],
            [group, me, "U", "9", "3-1", 10],
        ),
        "deregister": ([stream, lease, KEYS.inbox(me), KEYS.consumers], [group, me, "c", "none"]),
        "note_crash": (
            [stream, KEYS.attempts, KEYS.runs, KEYS.noted(me), KEYS.errors, KEYS.failures],
            [group, me, "r", 9, 1000, "1-1", 2, 1, 1, 0, ""],
        ),
    }
    look: dict[str, tuple[list[str], list[str | int]]] = {
        "find_entries": ([stream], ["XREVRANGE", "+", "-", 100, "ticket_id", "T"]),
        "look_again": ([stream, KEYS.tickets, KEYS.attempts], [group, "T", "1-1", "2-1"]),
        "read_fields": ([stream], [100, "", 1, "ticket_id", "1-1", "2-1"]),
        "read_letters": ([KEYS.dead, KEYS.letters], ["-", "+", 100, "", ""]),
    }
    sign = uid_key(stream, b"x").decode()
    return {
        "sender": {
            "send": (
                [stream, log.behind, KEYS.taken, stream, sign],
                [60_000, 0, group, 1000, 2, "ticket_id", "T", 2, "ticket_id", "U"],
            )
        },
        "streamer": lead,
        "reader": {"note_checkpoint": ([log.checkpoints], ["n", 3, "1-1", ""])},
        "consumer": own,
        "auditor": look,
    }[user]


@pytest.mark.parametrize("user", ["sender", "streamer", "reader", "consumer", "auditor"])
def test_no_number_that_a_user_gives_to_a_script_holds_the_server_up(emptied: Guarded, user: str) -> None:
    emptied.link("master").load_for_others(scripts_for_others())
    samples, link, admin = _samples(user), emptied.link(user), emptied.admin
    assert set(samples) == set(_ALL[user].scripts)

    def stage() -> None:
        admin.call("FLUSHALL")
        fields = ("ticket_id", "T", "body", "x" * 1000)
        admin.all_of([("XADD", KEYS.stream, f"{n}-1", *fields) for n in range(1, 50)])
        admin.call("XGROUP", "CREATE", KEYS.stream, KEYS.group, "0")
        admin.call("XREADGROUP", "GROUP", KEYS.group, "c:1", "COUNT", 3, "STREAMS", KEYS.stream, ">")
        admin.call("HSET", KEYS.tickets, "T", "c:1 9 1-1 2-1", "U", "c:1 9 3-1")
        admin.call("SET", KEYS.lease("c:1"), "live", "PX", 60_000)
        admin.call("SET", LogKeys(KEYS.stream).leader, "7 here", "PX", 60_000)

    for script, (keys, arguments) in samples.items():
        stage()
        digest = link.digest(script)
        for place in range(len(arguments)):
            for wrong in _WRONG:
                given = [*arguments[:place], wrong, *arguments[place + 1 :]]
                began = time.monotonic()
                with suppress(CommandRefused, GroupMissing):
                    link.call("EVALSHA", digest, len(keys), *keys, *given)
                assert admin.call("PING") == b"PONG", (script, place, wrong)
                assert time.monotonic() - began < 1, (script, place, wrong)
        stage()
        link.call("EVALSHA", digest, len(keys), *keys, *arguments)
