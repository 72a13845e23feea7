"""Metrics of real programs, read with Prometheus' own parser; and whether dashboard and alerts ask for what there
is."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import requests
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.hands import EmbeddedRedis
from tests.integration.factories import spent
from tests.process.crew import KEYS, Crew
from tests.process.machine import ROOT
from usher import Link

pytestmark = pytest.mark.process

_TICKETS = 300
#: As many messages of as many tickets run at the same time: the slots of a consumer.
_AT_ONCE = 8
_HANDLER = """
from usher import GiveUp
def handle(message):
    if message.fields["text"] == "bad":
        raise GiveUp("bad")
    if message.fields["text"] == "again" and message.attempt == 1:
        raise ValueError("once")
"""


class Pages:
    """A crew that has handled messages, and lost a consumer; and what its programs tell."""

    def __init__(self, crew: Crew, link: Link, systemd: socket.socket) -> None:
        self.crew = crew
        self.link = link
        self.systemd = systemd
        health = crew.events("listening", "c")
        self.consumer_urls = {record["program"]: record["url"] for record in health}

    @staticmethod
    def samples(url: str) -> dict[str, float]:
        """``name{label="value"}`` -> value; of all families, read by the real parser."""
        answer = requests.get(f"{url}/metrics", timeout=20)
        assert answer.status_code == 200
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        found = {}
        for family in text_string_to_metric_families(answer.text):
            assert family.documentation or not family.name.startswith("usher_"), family.name
            for sample in family.samples:
                labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
                found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
        return found


def is_done(crew: Crew) -> bool:
    """Whether every master says so: what they say may be a second old."""
    told = [requests.get(f"{url}/api/lag", timeout=20).json() for url in crew.masters]
    return all(document["unfinished"] == 0 for document in told)


@pytest.fixture(scope="module")
def pages() -> Iterator[Pages]:
    with (
        tempfile.TemporaryDirectory(prefix="usher-t-", dir="/tmp") as name,
        EmbeddedRedis(Path(name) / "redis", port=None, durable=False) as redis,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as systemd,
    ):
        systemd.bind(f"{name}/notify")
        folder = Path(name)
        (folder / "shop.py").write_text(_HANDLER)
        link = Link(redis.url, "test")
        with Crew(folder, redis.url, NOTIFY_SOCKET=f"{name}/notify") as crew:
            crew.start(2, ["c1", "c2"], "shop:handle", USHER_RETRY_SECONDS="0.05")
            words = ["bad", "again", *["good"] * (_TICKETS - 2)]
            link.pipeline(
                [("XADD", KEYS.stream, "*", "ticket_id", f"secret-{n}", "text", word) for n, word in enumerate(words)]
            )
            time.sleep(1.1)
            crew.until(lambda: is_done(crew), 60, "all are done")
            crew.kill_both("c2")
            crew.until(lambda: crew.events("consumer_recovered", "master"), 60, "its loss is noticed")
            link.pipeline([("XADD", KEYS.stream, "*", "ticket_id", "late", "text", "good") for _ in range(3)])
            time.sleep(1.1)  # until nobody believes what was before
            crew.until(lambda: is_done(crew), 60, "these are done too")
            yield Pages(crew, link, systemd)
        link.close()


def test_the_master_tells_what_it_did_and_how_the_stream_is(pages: Pages) -> None:
    told = [pages.samples(url) for url in pages.crew.masters]
    assert sum(page["usher_leader"] for page in told) == 1
    leader = max(told, key=lambda page: page["usher_leader"])
    assert leader["usher_handed_over_messages_total"] >= _TICKETS + 3
    assert leader["usher_hand_over_call_seconds_count"] == leader["usher_hand_over_batches_total"] > 0
    assert leader["usher_hand_over_wait_seconds_count"] > 0
    assert leader["usher_recovery_seconds_count"] == leader["usher_consumers_lost_total"] == 1
    assert leader['usher_service_turns_total{service="dispatch"}'] > 0
    for page in told:  # a standby knows the stream too
        assert page["usher_redis_up"] == page["usher_leader_known"] == 1
        assert page["usher_redis_refuses_writes"] == page["usher_oldest_unheld_message_age_seconds"] == 0
        assert page["usher_stream_entries"] == _TICKETS + 3
        assert (
            page["usher_lag_messages"]
            == page["usher_unfinished_messages"]
            == page["usher_oldest_message_age_seconds"]
            == 0
        )
        assert page["usher_dead_letters_open"] == 1
        assert page['usher_consumers{state="live"}'] == page['usher_consumer_live{consumer="c1"}'] == 1
        assert page['usher_service_threads_down{service="elect"}'] == 0


def test_a_consumer_tells_what_its_handlers_did(pages: Pages) -> None:
    page = pages.samples(pages.consumer_urls["c1"])
    done = page['usher_attempts_total{outcome="done"}']
    assert done == page["usher_acknowledged_messages_total"] > 0
    failed = sum(
        value for name, value in page.items() if name.startswith("usher_attempts_total") and "done" not in name
    )
    assert page["usher_handler_seconds_count"] == page['usher_handler_seconds_bucket{le="+Inf"}'] == done + failed
    assert 0 < page["usher_wait_seconds_count"] <= done
    assert page["usher_registered"] == 1
    assert 0 < page["usher_lease_left_seconds"] <= 3
    assert page['usher_service_turns_total{service="ack"}'] > 0
    assert page['usher_service_threads_down{service="work"}'] == 0, "the workers are one role"


def test_no_label_names_a_ticket_or_a_message_and_the_pages_stay_small(pages: Pages) -> None:
    for url in [*pages.crew.masters, pages.consumer_urls["c1"]]:
        text = requests.get(f"{url}/metrics", timeout=20).text
        assert "secret-" not in text
        assert not re.search(r'="\d{10,}-\d+"', text)
        assert len(text) < 20_000


def test_systemd_is_told_when_a_program_listens(pages: Pages) -> None:
    """For Type=notify (deploy/systemd)."""
    told = []
    with contextlib.suppress(BlockingIOError):
        while True:
            told.append(pages.systemd.recv(4096))
    assert sum(line == b"READY=1" for text in told for line in text.splitlines()) >= 4, "two masters, two consumers"


def test_asking_again_and_again_costs_redis_nothing_more(pages: Pages) -> None:
    asked = spent(pages.link, lambda: [pages.samples(pages.crew.masters[0]) for _ in range(30)])
    assert asked["xpending"] < 15, "30 pages of one master in little more than a second"


def test_lag_is_plain_json_for_autoscalers(pages: Pages) -> None:
    for url in pages.crew.masters:
        document = requests.get(f"{url}/api/lag", timeout=20).json()
        assert (document["lag"], document["unfinished"], document["consumers"], document["lag_is_exact"]) == (
            0,
            0,
            1,
            True,
        )


def test_what_the_readme_tells_kubernetes_and_keda_is_there(pages: Pages) -> None:
    """The YAML of the README that `usher init-deploy` writes, asked as a kubelet and KEDA's scalers ask."""
    text = (ROOT / "deploy" / "init" / "README.md.j2").read_text()
    told = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]
    probes = {name: probe for document in told for name, probe in document.items() if name.endswith("Probe")}
    assert set(probes) == {"livenessProbe", "readinessProbe"}
    triggers = {trigger["type"]: trigger["metadata"] for document in told for trigger in document.get("triggers", ())}
    assert set(triggers) == {"metrics-api", "prometheus"}
    for url in [*pages.crew.masters, pages.consumer_urls["c1"]]:
        for probe in probes.values():
            assert requests.get(url + probe["httpGet"]["path"], timeout=20).status_code == 200
    for url in pages.crew.masters:
        document = requests.get(url + urlsplit(triggers["metrics-api"]["url"]).path, timeout=20).json()
        assert document[triggers["metrics-api"]["valueLocation"]] == 0
        [name] = re.findall(r"^max\((\w+)\)$", triggers["prometheus"]["query"])
        assert pages.samples(url)[name] == 0


def test_dashboard_and_alerts_ask_only_for_what_there_is(pages: Pages) -> None:
    told: set[str] = set()
    for url in [*pages.crew.masters, pages.consumer_urls["c1"]]:
        told |= {name.partition("{")[0] for name in pages.samples(url)}
    asked = names_in((ROOT / "deploy" / "alerts.yml").read_text()) | names_in(
        (ROOT / "deploy" / "grafana.json").read_text()
    )
    # Only there after something happened that did not happen here.
    rare = {"usher_audit_findings", "usher_audit_last_run_timestamp_seconds", "usher_audit_unproven_seconds"}
    streamers = {
        "usher_outbox_streams",
        "usher_outbox_behind_seconds",
        "usher_outbox_refused_rows_total",
        "usher_outbox_halted_tickets",
    }  # test_outbox.py sees these
    rare |= streamers
    assert len(asked) > 15
    assert asked - rare <= told
    assert rare | asked <= {*told, *rare}


def names_in(text: str) -> set[str]:
    """Metric names in PromQL, wherever it stands in a text."""
    return set(re.findall(r"\b(?:usher|process)_[a-z_]+\b", text))


def test_the_dashboard_is_one_that_grafana_can_import() -> None:
    dashboard = json.loads((ROOT / "deploy" / "grafana.json").read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert dashboard["title"] and dashboard["uid"] and len(panels) >= 12
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    for panel in panels:
        assert panel["title"] and panel["gridPos"]["w"] + panel["gridPos"]["x"] <= 24
        assert panel["targets"] and all(names_in(target["expr"]) for target in panel["targets"])


def test_who_drained_has_left_and_who_was_killed_is_lost_although_it_is_back_at_once(pages: Pages) -> None:
    crew = pages.crew

    def told(action: str, name: str) -> list[str]:
        return [
            found["consumer"] for found in crew.events(action, "master") if found["consumer"].startswith(f"{name}:")
        ]

    def recoveries() -> float:
        return max(pages.samples(url)["usher_recovery_seconds_count"] for url in crew.masters)

    for name in ("c3", "c4"):
        crew.start_consumer(name, "shop:handle")
        crew.until(lambda name=name: told("consumer_joined", name), 30, f"{name} is there")
    assert crew.stop("c3") == 0
    crew.until(lambda: told("consumer_left", "c3"), 30, "c3 has left")
    crew.kill_worker("c4")
    crew.until(
        lambda: told("consumer_lost", "c4") and len(told("consumer_joined", "c4")) == 2, 30, "c4 is lost, and back"
    )
    crew.until(lambda: recoveries() == 2, 30, "of c2 and c4, and no other")
    assert not told("consumer_lost", "c3") + told("consumer_recovered", "c3") + told("consumer_left", "c4")
    assert max(pages.samples(url)["usher_consumers_lost_total"] for url in crew.masters) == 2


def test_a_consumer_counts_what_no_master_could_be_told_and_logs_it_seldom(folder: Path, link: Link) -> None:
    waits = (
        "    while not os.path.exists('go'):\n        time.sleep(0.02)\n    time.sleep(int(message.fields['n']) / 10)\n"
    )
    (folder / "shop.py").write_text(f"import os, time\ndef handle(message):\n{waits}")
    with Crew(folder, link.url) as crew:
        crew.start(1, ["c1"], "shop:handle")
        link.pipeline([("XADD", KEYS.stream, "*", "ticket_id", f"T{n}", "n", n) for n in range(_AT_ONCE)])
        url = crew.events("listening", "c1")[0]["url"]
        crew.until(lambda: Pages.samples(url).get("usher_running_handlers") == _AT_ONCE, 10, "all run")
        crew.kill_both("master-1")
        (folder / "go").touch()
        crew.until(
            lambda: Pages.samples(url)["usher_unreported_messages_total"] == _AT_ONCE,
            20,
            "they are done, and nobody heard of it",
        )
        assert Pages.samples(url)["usher_acknowledged_messages_total"] == _AT_ONCE
        assert len(crew.events("report_dropped", "c1")) == 1
        assert crew.stop("c1") == 0
        assert sum(record["ids"] for record in crew.events("report_dropped", "c1")) == _AT_ONCE, (
            "the log has them all in the end"
        )
