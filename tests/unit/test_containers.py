"""The files for containers, piece by piece: nothing is started. Settings of every container are accepted together, and names,
ports, mounts, selectors and times fit each other."""

from __future__ import annotations

import ipaddress
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import pytest
import yaml
from dotenv import dotenv_values

from tests.rules import ROOT
from usher.cli import COMMANDS, load_command
from usher.common.http.credentials import Identity, Role, digest_of, read_tokens_file
from usher.common.runtime.settings import CommonSettings, load
from usher.consumer.settings import ConsumerSettings
from usher.deploy.local.up import AROUND_DRAIN_S
from usher.master.settings import MasterSettings

_OF_KEDA = ("ScaledObject", "TriggerAuthentication")  # Kubernetes' schemas do not know them
CONTAINER, KUBERNETES = ROOT / "deploy" / "container", ROOT / "deploy" / "kubernetes"
_SETTINGS: dict[str, type[CommonSettings]] = {"master": MasterSettings, "consumer": ConsumerSettings}


def accepted(command: str, environ: Mapping[str, str]) -> Any:
    """Return the settings that a program takes from its environment; raises for a wrong one, and for any that no program
    knows."""
    loaded = load(_SETTINGS.get(command, CommonSettings), environ)
    known = {f"USHER_{field.upper()}" for one in _SETTINGS.values() for field in one.model_fields}
    known |= set(re.findall(r'envvar="(USHER_\w+)"', (ROOT / "master" / "audit" / "cli.py").read_text()))
    assert {name for name in environ if name.startswith("USHER_")} <= known
    return loaded


def compose(**environ: str) -> dict[str, Any]:
    text = (CONTAINER / "compose.yaml").read_text()
    given = {"USHER_API_TOKEN": "of-32-characters-or-some-more-of-them", **environ}
    given = {"USHER_VIEWER_TOKEN": "v", "USHER_TOKENS": "t", "USHER_REDIS_USERS": "u"} | given
    given.setdefault("USHER_CONSUMER_TOKEN", given["USHER_API_TOKEN"])
    given = {
        f"USHER_{role}_REDIS": "redis://redis:6379/0" for role in ("MASTER", "CONSUMER", "SENDER", "AUDITOR")
    } | given
    text = re.sub(r"\$\{(\w+)(?::-([^}]*)|:\?[^}]*)?\}", lambda found: given.get(found[1]) or found[2] or "", text)
    read: dict[str, Any] = yaml.safe_load(text)
    return read


def ours(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: one for name, one in document["services"].items() if one["image"] == "usher"}


class TestCompose:
    def test_every_container_of_ours_has_settings_that_are_accepted(self) -> None:
        services = ours(compose())
        assert [one["command"][0] for one in services.values()] == [
            *["master"] * 2,
            *["consumer"] * 3,
            *["audit"] * 3,
            "send",
        ]
        masters = [f"http://{name}:8700" for name in services if name.startswith("master")]
        consumers = [name for name in services if name.startswith("consumer")]
        for name, one in services.items():
            command = one["command"][0]
            settings = accepted(command, one["environment"])
            click.Context(load_command(COMMANDS[command][0])).command.make_context(command, one["command"][1:])
            assert urlsplit(settings.redis_url).hostname == "redis"
            if command == "master":
                assert settings.health_hosts.split(",") == consumers
                assert settings.advertise_url == f"http://{name}:8700" in masters
            elif command == "consumer":
                assert (settings.consumer_name, settings.master_urls.split(",")) == (name, masters)
                assert settings.advertise_url == f"http://{name}:{settings.bind.rpartition(':')[2]}"
                assert int(one["stop_grace_period"][:-1]) >= settings.drain_seconds + AROUND_DRAIN_S
            if command in _SETTINGS:
                assert (
                    f"127.0.0.1:{settings.bind.rpartition(':')[2]}/api/health/ready" in one["healthcheck"]["test"][-1]
                )
                assert f"{name}:/state" in one["volumes"]
            assert one["read_only"] and one["cap_drop"] == ["ALL"]

    def test_what_is_mounted_is_there_and_only_this_machine_is_let_in(self) -> None:
        document = compose()
        for one in document["services"].values():
            for volume in one.get("volumes", ()):
                source = volume.partition(":")[0]
                assert source in document["volumes"] or (CONTAINER / source).is_file()
            assert all(port.startswith("127.0.0.1:") for port in one.get("ports", ()))
            assert ":" in one["image"] or one["image"] == "usher"
            assert not isinstance(one.get("command"), str)
        assert (CONTAINER / document["services"]["master-1"]["build"]["context"]).resolve() == ROOT

    def test_its_secrets_are_a_token_and_a_user_of_redis_for_each_role(self, tmp_path: Path) -> None:
        """Handlers and Prometheus had the token with all rights, and Redis no password."""
        there = tmp_path / "container"
        there.mkdir()
        shutil.copy(CONTAINER.parent / "users.acl", tmp_path)
        shutil.copy(CONTAINER / "secrets.sh", there)
        subprocess.run(["sh", "secrets.sh"], cwd=there, check=True, capture_output=True)
        assert (there / ".env").stat().st_mode & 0o777 == 0o600
        made = {name: value or "" for name, value in dotenv_values(there / ".env").items()}
        text = re.sub(r"\$\{(\w+)[^}]*\}", lambda found: f"<{found[1]}>", (CONTAINER / "compose.yaml").read_text())
        document = yaml.safe_load(text)
        environs = {name: one.get("environment") for name, one in document["services"].items()}
        assert environs["consumer-1"]["USHER_API_TOKEN"] == "<USHER_CONSUMER_TOKEN>"
        assert environs["producer"] == {"USHER_REDIS_URL": "<USHER_SENDER_REDIS>"}
        assert document["configs"]["token"]["content"] == "<USHER_VIEWER_TOKEN>"
        (tmp_path / "tokens").write_text(made["USHER_TOKENS"])
        (tmp_path / "tokens").chmod(0o600)
        roles = read_tokens_file(tmp_path / "tokens")
        found = [roles[digest_of(made[f"USHER_{role}_TOKEN"])] for role in ("CONSUMER", "VIEWER")]
        assert found == [Identity(Role.CONSUMER, "*"), Identity(Role.VIEWER, "prometheus")]
        users = {line.split()[1]: line.split() for line in made["USHER_REDIS_USERS"].splitlines()}
        assert users["default"][2] == "off"
        for role in ("master", "consumer", "sender", "auditor"):
            url = urlsplit(made[f"USHER_{role.upper()}_REDIS"])
            assert users[role][2:5] == ["on", "resetpass", f"#{digest_of(url.password or '')}"]
            assert url.username == role

    def test_its_schema_accepts_it(self) -> None:
        read = pytest.importorskip("compose_spec").PyCompose.from_yaml(yaml.safe_dump(compose(), sort_keys=False))
        read.validate()
        assert set(read.services) == compose()["services"].keys()


def manifests() -> dict[tuple[str, str], dict[str, Any]]:
    found = {}
    for file in (*KUBERNETES.glob("*.yaml"), *KUBERNETES.glob("keda/*.yaml")):
        for one in yaml.safe_load_all(file.read_text()):
            found[one["kind"], one.get("metadata", {}).get("name", file.parent.name)] = one
    return found


class TestKubernetes:
    def test_the_containers_have_settings_that_are_accepted(self) -> None:
        made = manifests()
        [config] = made["Kustomization", "kubernetes"]["configMapGenerator"]
        shared = dict(line.partition("=")[::2] for line in config["literals"])
        shared |= {
            "USHER_API_TOKEN": "of-32-characters-or-some-more-of-them",
            "USHER_REDIS_URL": "redis://u:p@redis:6379/0",
        }
        for kind, owner, replicas in (("StatefulSet", "usher-master", 2), ("Deployment", "usher-consumer", 3)):
            spec = made[kind, owner]["spec"]
            pod = spec["template"]["spec"]
            [container] = pod["containers"]
            fields = {"metadata.name": f"{owner}-0", "status.podIP": "10.1.2.3"}
            environ = dict(shared)
            for one in container["env"]:
                value = one["value"] if "value" in one else fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
                for name, known in environ.items():
                    value = value.replace(f"$({name})", known)
                environ[one["name"]] = value
            secrets = "usher-consumer" if kind == "Deployment" else "usher"  # a handler sees no token of others
            assert {next(iter(one.values()))["name"] for one in container["envFrom"]} == {"usher", secrets}
            settings = accepted(*container["args"], environ)
            [port] = container["ports"]
            assert settings.bind == f"[::]:{port['containerPort']}"
            assert spec["replicas"] == replicas
            assert not pod["enableServiceLinks"]
            for probe, path in (("livenessProbe", "live"), ("readinessProbe", "ready")):
                assert container[probe]["httpGet"] == {"path": f"/api/health/{path}", "port": port["name"]}
            assert container["securityContext"]["readOnlyRootFilesystem"]
            assert pod["securityContext"]["runAsNonRoot"]
            mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
            assert mounts == {"state": "/state", "tmp": "/tmp"} | (
                {"tokens": "/tokens"} if kind == "StatefulSet" else {}
            )
            assert {volume["name"] for volume in pod["volumes"]} == mounts.keys()
            if isinstance(settings, MasterSettings):
                network = ipaddress.ip_network(settings.health_hosts)
                assert settings.advertise_url == f"http://usher-master-0.{spec['serviceName']}:8700"
            else:
                assert ipaddress.ip_address(urlsplit(settings.advertise_url).hostname or "") in network
                assert pod["terminationGracePeriodSeconds"] >= settings.drain_seconds + AROUND_DRAIN_S
                addresses = [f"http://usher-master-{number}.usher-masters:8700" for number in range(2)]
                assert settings.master_urls.split(",") == addresses

    def test_the_schemas_of_kubernetes_accept_them(self) -> None:
        kubernetes_validate = pytest.importorskip("kubernetes_validate")
        for (kind, _), one in manifests().items():
            if kind not in ("Kustomization", "Component", *_OF_KEDA):
                kubernetes_validate.validate(one, "1.31", strict=True)

    def test_the_overlay_of_the_documents_is_rendered(self, tmp_path: Path) -> None:
        plain, with_keda = re.findall(
            r"^```yaml\n(.*?)^```$", (ROOT / "docs" / "containers.md").read_text(), re.MULTILINE | re.DOTALL
        )
        made = rendered(tmp_path / "plain", plain)
        assert made["Deployment", "usher-consumer"]["spec"]["replicas"] == 3
        assert made.keys().isdisjoint({("ScaledObject", "usher-consumer")})
        made = rendered(tmp_path / "with_keda", plain + with_keda)
        assert "replicas" not in made["Deployment", "usher-consumer"]["spec"]
        [trigger] = made["ScaledObject", "usher-consumer"]["spec"]["triggers"]
        service = made["Service", "usher"]["metadata"]
        assert urlsplit(trigger["metadata"]["url"]).hostname == f"{service['name']}.{service['namespace']}.svc"
        [settings] = [one["data"] for (kind, _), one in made.items() if kind == "ConfigMap"]
        assert settings["USHER_HANDLER"] == "shop.orders:handle" and "USHER_MASTER_URLS" in settings
        for owner in (("StatefulSet", "usher-master"), ("Deployment", "usher-consumer")):
            [container] = made[owner]["spec"]["template"]["spec"]["containers"]
            assert container["image"] == "registry.example/shop:17"
            [config] = [one["configMapRef"]["name"] for one in container["envFrom"] if "configMapRef" in one]
            assert ("ConfigMap", config) in made
        assert {one["metadata"]["namespace"] for one in made.values()} == {"shop"}
        kubernetes_validate = pytest.importorskip("kubernetes_validate")
        for (kind, _), one in made.items():
            if kind not in _OF_KEDA:
                kubernetes_validate.validate(one, "1.31", strict=True)


def rendered(folder: Path, overlay: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Return what ``kubectl kustomize`` makes of an overlay beside our manifests."""
    command = ["kustomize", "build"] if shutil.which("kustomize") else ["kubectl", "kustomize"]
    if shutil.which(command[0]) is None:
        pytest.skip("neither kustomize nor kubectl is here")
    shutil.copytree(KUBERNETES, folder / "usher" / "deploy" / "kubernetes")
    (folder / "shop").mkdir()
    (folder / "shop" / "kustomization.yaml").write_text(overlay)
    done = subprocess.run([*command, str(folder / "shop")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(done.stdout)}
