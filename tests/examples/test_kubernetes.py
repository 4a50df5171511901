"""The Helm chart and the image: valid for Kubernetes, and true to the product."""

import json
import re
import subprocess
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tandem.config.flags import split_flags
from tandem.config.model import EffectiveConfig, load_config
from tandem.launch.planner.kubernetes import KubernetesApi, KubernetesExecutor
from tandem.queue.streams import QueueNames
from tests.examples.chart import (
    CHART,
    FOLDER,
    Helm,
    Manifest,
    kind_of,
    main_container,
    pod_templates,
    unpack_helm,
)
from tests.launch.planner.test_kubernetes import NEEDED

ROOT = FOLDER.parents[1]
HERE = Path(__file__).parent
VALUES: dict[str, Manifest] = yaml.safe_load((HERE / "kubernetes_values.yaml").read_text())
SCHEMAS: dict[str, Any] = json.loads((HERE / "kubernetes_schemas.json").read_text())
KUBERNETES = "1.36"


@pytest.fixture(scope="module", autouse=True)
def _schemas_are_read_once() -> Iterator[None]:
    """Of kubernetes_validate, which reads two files of a megabyte for each object."""
    utils = kubernetes_validate.utils
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "schema_contents", cache(utils.schema_contents))
        yield


@pytest.fixture(scope="module")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    return Helm(unpack_helm(tmp_path_factory.mktemp("helm")))


@pytest.fixture(scope="module", params=VALUES)
def manifests(request: pytest.FixtureRequest, helm: Helm) -> list[Manifest]:
    return helm.render(VALUES[request.param])


def config_of(manifests: list[Manifest], pod: Manifest, folder: Path) -> EffectiveConfig:
    """The configuration that the process in this pod has."""
    [config] = [each for each in manifests if each["kind"] == "ConfigMap"]
    file = folder / "tandem.yaml"
    file.write_text(config["data"]["tandem.yaml"])
    container = main_container(pod)
    environment = {
        each["name"]: str(each.get("value", "tls://secret")).replace("$(POD_IP)", "10.0.0.1")
        for each in container["env"]
    }
    _, flags = split_flags(container["args"])
    return load_config(file=file, environment=environment, flags=flags)


def test_helm_finds_no_fault(helm: Helm) -> None:
    done = helm.run(["lint", "--strict", str(CHART)], VALUES["default"])
    assert done.returncode == 0, done.stdout


def test_every_object_is_valid(manifests: list[Manifest]) -> None:
    for manifest in manifests:
        if schema := SCHEMAS.get(manifest["kind"]):
            jsonschema.validate(manifest, schema)
        else:
            kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    for pod in pod_templates(manifests):
        as_pod = {"apiVersion": "v1", "kind": "Pod", **pod}
        kubernetes_validate.validate(as_pod, KUBERNETES, strict=True)


def test_selectors_find_their_pods(manifests: list[Manifest]) -> None:
    labels = [pod["metadata"]["labels"] for pod in pod_templates(manifests)]
    for manifest in manifests:
        spec = manifest.get("spec", {})
        selector = spec.get("selector") or spec.get("podSelector")
        if selector:
            wanted = selector.get("matchLabels", selector)
            assert any(wanted.items() <= each.items() for each in labels), manifest["metadata"]
    names = [(each["kind"], each["metadata"]["name"]) for each in manifests]
    assert len(set(names)) == len(names)


def test_the_image_and_the_commands_are_the_product_s(manifests: list[Manifest]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    recipe = (FOLDER / "Dockerfile").read_text()
    [entry_point] = re.findall(r'^ENTRYPOINT \["(.*)"\]$', recipe, re.MULTILINE)
    [user] = re.findall(r"^USER (\d+):\d+$", recipe, re.MULTILINE)
    [extras] = re.findall(r"^ARG EXTRAS=\[(.*)\]$", recipe, re.MULTILINE)
    assert entry_point in project["scripts"]
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == version("tandem-serve")
    for pod in pod_templates(manifests):
        container = main_container(pod)
        assert re.fullmatch(r"(registry\.example/)?tandem:[\w.]+", container["image"])
        assert container["args"][0] in (
            "epp", "frontend", "planner", "worker", "decode", "prefill",
        )  # fmt: skip
        assert container.get("command", ["sh"])[0] == "sh"
        assert pod["spec"]["securityContext"]["runAsUser"] == int(user)


def test_config_ports_and_probes_are_the_product_s(
    manifests: list[Manifest], tmp_path: Path
) -> None:
    for pod in pod_templates(manifests):
        kind, container = kind_of(pod), main_container(pod)
        config = config_of(manifests, pod, tmp_path).config
        lifecycle = container.get("lifecycle", {"preStop": {"sleep": {"seconds": 0}}})
        pause_s = lifecycle["preStop"]["sleep"]["seconds"]
        grace_s = pod["spec"]["terminationGracePeriodSeconds"]
        assert grace_s > pause_s + config.runtime.drain_timeout_s + 2
        ports = {each["name"]: each["containerPort"] for each in container.get("ports", [])}
        runtime = config.runtime
        expected = {
            "frontend": {"http": config.frontend.port},
            "worker": {"requests": runtime.port, "metrics": runtime.metrics_port},
            "planner": {"metrics": runtime.metrics_port},
            "epp": {"grpc": config.epp.port, "metrics": runtime.metrics_port},
        }[kind]
        assert ports == expected
        probes = [container[key] for key in container if key.endswith("Probe")]
        assert {each["httpGet"]["path"] for each in probes} == {"/live", "/health"}
        scheme = config.frontend.scheme.upper() if kind == "frontend" else "HTTP"
        assert all(each["httpGet"]["scheme"] == scheme for each in probes)
        mounts = [each["mountPath"] for each in container["volumeMounts"]]
        files = [runtime.tls_cert_file, runtime.tls_key_file, runtime.tls_ca_file]
        if kind == "frontend":
            assert runtime.host == runtime.advertise_host
            server = config.frontend
            files += [server.tls_cert_file, server.tls_key_file, server.api_keys_file]
        if kind == "epp":
            assert config.epp.host == "0.0.0.0"
            files += [config.epp.tls_cert_file, config.epp.tls_key_file]
            files.append(config.frontend.api_keys_file)
        assert all(str(Path(file).parent) in mounts for file in files if file)


def test_firewalls_open_the_ports_of_the_config(manifests: list[Manifest], tmp_path: Path) -> None:
    policies = {
        each["metadata"]["name"].removeprefix("mine-"): each["spec"]
        for each in manifests
        if each["kind"] == "NetworkPolicy"
    }
    [pod, *_] = [each for each in pod_templates(manifests) if kind_of(each) == "worker"]
    config = config_of(manifests, pod, tmp_path).config
    opened = [port for rule in policies["workers"]["ingress"] for port in rule["ports"]]
    first, last = map(int, (config.transfer.port_range or "").split("-"))
    assert opened == [
        {"port": config.runtime.port},
        {"port": first, "endPort": last},
        {"port": config.runtime.metrics_port},
    ]
    opened = [port for rule in policies["frontend"]["ingress"] for port in rule["ports"]]
    responses = [{"port": config.runtime.port}] if config.frontend.share_responses else []
    assert opened == [{"port": config.frontend.port}, *responses]


def test_a_gateway_finds_the_frontends_and_the_picker(
    manifests: list[Manifest], tmp_path: Path
) -> None:
    named = {(each["kind"], each["metadata"]["name"]): each for each in manifests}
    pickers = [each for each in pod_templates(manifests) if kind_of(each) == "epp"]
    pools = [each for each in manifests if each["kind"] == "InferencePool"]
    assert len(pickers) == len(pools)
    for pod, pool in zip(pickers, pools, strict=True):
        config = config_of(manifests, pod, tmp_path).config
        assert pool["apiVersion"] == "inference.networking.k8s.io/v1"
        assert pool["spec"]["targetPorts"] == [{"number": config.frontend.port}]
        chosen = pool["spec"]["selector"]["matchLabels"].items()
        found = [
            kind_of(each)
            for each in pod_templates(manifests)
            if chosen <= each["metadata"]["labels"].items()
        ]
        assert found == ["frontend"]
        service = named["Service", pool["spec"]["endpointPickerRef"]["name"]]["spec"]
        [port] = service["ports"]
        assert port["port"] == pool["spec"]["endpointPickerRef"]["port"]["number"]
        assert service["selector"].items() <= pod["metadata"]["labels"].items()
        [grpc, _] = named["NetworkPolicy", "mine-epp"]["spec"]["ingress"]
        assert grpc["ports"] == [{"port": config.epp.port}]


def test_the_chart_stays_small() -> None:
    files = [CHART / "Chart.yaml", CHART / "values.yaml", *(CHART / "templates").iterdir()]
    assert sum(len(file.read_text().splitlines()) for file in files) <= 400


def test_queries_name_metrics_and_labels_that_exist(manifests: list[Manifest]) -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    rows = dict(re.findall(r"^\| `(tandem_\w+)` \| (.*)$", page, re.MULTILINE))
    for manifest in manifests:
        if manifest["kind"] != "ScaledObject":
            continue
        targets = [m["metadata"]["name"] for m in manifests if m["kind"] == "Deployment"]
        assert manifest["spec"]["scaleTargetRef"]["name"] in targets
        for trigger in manifest["spec"]["triggers"]:
            for name, labels in re.findall(
                r"(tandem_\w+)\{(.*?)\}", trigger["metadata"].get("query", "")
            ):
                for label, values in re.findall(r'(\w+)=~?"(.*?)"', labels):
                    assert f"`{label}`" in rows[name]
                    if label == "state":
                        assert all(f"`{value}`" in rows[name] for value in values.split("|"))


def test_the_scaler_s_stream_is_the_queue_s(helm: Helm) -> None:
    manifests = helm.render(VALUES["scaled-by-nats"])
    [scaled] = [each for each in manifests if each["kind"] == "ScaledObject"]
    [trigger] = scaled["spec"]["triggers"]
    names = QueueNames.of("prod_1", "org/Model_1.5", "0123456789abcdef")
    assert trigger["metadata"]["stream"] == names.stream
    assert trigger["metadata"]["consumer"] == names.consumer


def test_a_worker_with_certificates_is_dialed_by_a_name(helm: Helm, tmp_path: Path) -> None:
    manifests = helm.render(VALUES["encrypted"])
    [pod] = [each for each in pod_templates(manifests) if kind_of(each) == "worker"]
    container = main_container(pod)
    program = tmp_path / "tandem"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o700)
    done = subprocess.run(
        [*container["command"], *container["args"]],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "POD_IP": "10.1.2.3"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    *arguments, name = done.stdout.splitlines()
    assert arguments == container["args"]
    assert name == "--runtime.advertise_host=10-1-2-3.mine-peers.prod.svc"
    services = [each for each in manifests if each["metadata"]["name"] == "mine-peers"]
    assert [each["spec"]["clusterIP"] for each in services] == ["None"]


def test_a_planner_may_do_to_its_deployments_what_it_does(helm: Helm) -> None:
    manifests = helm.render(VALUES["counted"])
    named = {(each["kind"], each["metadata"]["name"]): each for each in manifests}
    pod = named["Deployment", "mine-planner"]["spec"]["template"]
    arguments = main_container(pod)["args"]
    deployments = [each for at, each in enumerate(arguments) if arguments[at - 1] == "--deployment"]
    assert deployments == ["decode=mine-decode", "prefill=mine-prefill"]
    KubernetesExecutor(KubernetesApi("", ""), deployments, 30.0)
    for name in ("mine-decode", "mine-prefill"):
        assert "replicas" not in named["Deployment", name]["spec"]
    account = pod["spec"]["serviceAccountName"]
    assert pod["spec"]["automountServiceAccountToken"]
    assert ("ServiceAccount", account) in named
    binding = named["RoleBinding", account]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account}]
    rules = named["Role", binding["roleRef"]["name"]]["rules"]
    allowed = {
        (verb, resource)
        for rule in rules
        for verb in rule["verbs"]
        for resource in rule["resources"]
    }
    assert allowed == NEEDED
    others = [each for each in pod_templates(manifests) if kind_of(each) != "planner"]
    assert not any(each["spec"]["automountServiceAccountToken"] for each in others)


@pytest.mark.parametrize(
    "values, words",
    [
        ({"worker": []}, "worker"),
        ({"workers": [{"name": "both", "role": "worker"}]}, "oneOf"),
        ({"workers": [{"name": "p", "role": "prefill", "scale": {"min": 0, "max": 2}}]}, "min"),
        ({"disaggregatedSet": True}, "two groups"),
        (VALUES["scaled"] | {"planner": "act"}, "planner"),
        (VALUES["scaled-prefill"] | {"disaggregatedSet": True}, "LeaderWorkerSet 0.9"),
        (VALUES["scaled-prefill"] | {"config": {"planner": {"max_workers": 4}}}, "KEDA counts"),
        (VALUES["counted"] | {"disaggregatedSet": True}, "of a DisaggregatedSet"),
        (VALUES["scaled-by-nats"] | {"model": {"path": "a b"}}, "escape"),
        (VALUES["encrypted"] | {"config": {"frontend": {"share_responses": True}}}, "certificate"),
    ],
)
def test_values_that_cannot_work_are_refused(helm: Helm, values: Manifest, words: str) -> None:
    assert words in helm.refusal(values)
