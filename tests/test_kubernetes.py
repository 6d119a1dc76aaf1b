"""The manifests: valid for Kubernetes, and of one mind with the service about ports, paths, variables and time."""

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from pydantic import ByteSize, TypeAdapter

from dockerfile import environment_of_image, values
from logprobd.settings import ENV_PREFIX, ServeSettings, parse_memory_limit
from running import ROOT

FOLDER = ROOT / "deploy" / "kubernetes"
OVERLAYS = ("cpu", "gpu")
OLDEST, NEWEST = "1.32", "1.37"

Manifest = dict[str, Any]

needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl, which merges, is not here")


@cache
def built(overlay: str) -> list[Manifest]:
    """What kustomize makes of an overlay."""
    command = ["kubectl", "kustomize", str(FOLDER / "overlays" / overlay)]
    return list(yaml.safe_load_all(subprocess.run(command, capture_output=True, text=True, check=True).stdout))


def of_kind(manifests: list[Manifest], kind: str) -> Manifest:
    return next(manifest for manifest in manifests if manifest["kind"] == kind)


def base() -> list[Manifest]:
    resources = yaml.safe_load((FOLDER / "base" / "kustomization.yaml").read_text())["resources"]
    return [yaml.safe_load((FOLDER / "base" / name).read_text()) for name in resources]


def pod(manifests: list[Manifest]) -> Manifest:
    spec: Manifest = of_kind(manifests, "Deployment")["spec"]["template"]["spec"]
    return spec


def container(manifests: list[Manifest]) -> Manifest:
    (only,) = pod(manifests)["containers"]
    return dict(only)


def variables(manifests: list[Manifest]) -> dict[str, Any]:
    return {variable["name"]: variable.get("value") for variable in container(manifests)["env"]}


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_the_base_is_valid(version: str) -> None:
    for manifest in base():
        kubernetes_validate.validate(manifest, version, strict=True)


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_an_overlay_is_valid(overlay: str, version: str) -> None:
    kinds = {manifest["kind"] for manifest in built(overlay)}
    for manifest in built(overlay):
        kubernetes_validate.validate(manifest, version, strict=True)

    assert kinds >= {manifest["kind"] for manifest in base()}


def test_the_validator_finds_a_misspelt_field() -> None:
    deployment = of_kind(base(), "Deployment")
    deployment["spec"]["template"]["spec"]["terminationGracePeriod"] = 75

    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, NEWEST, strict=True)


def test_every_file_is_used() -> None:
    for kustomization in FOLDER.rglob("kustomization.yaml"):
        content = yaml.safe_load(kustomization.read_text())
        named = set(content["resources"]) | {patch["path"] for patch in content.get("patches", ())}
        beside = {path.name for path in kustomization.parent.glob("*.yaml")} - {kustomization.name}

        assert beside == {name for name in named if name.endswith(".yaml")}


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_variable_is_an_option_with_a_possible_value(overlay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {name: value for name, value in variables(built(overlay)).items() if name.startswith(ENV_PREFIX)}
    known = {ENV_PREFIX + name.upper() for name in ServeSettings.model_fields}
    for name, value in {**environment_of_image(), **given, "LOGPROBD_API_KEY": "key"}.items():
        monkeypatch.setenv(name, str(value))
    settings = ServeSettings()

    assert set(given) <= known
    assert settings.api_keys == ("key",)
    assert not settings.no_auth
    assert settings.devices == ("cpu" if overlay == "cpu" else "cuda:0")


def test_ports_and_users_are_those_of_the_image() -> None:
    manifests = base()
    (port,) = container(manifests)["ports"]
    (service_port,) = of_kind(manifests, "Service")["spec"]["ports"]
    (ingress,) = of_kind(manifests, "NetworkPolicy")["spec"]["ingress"]

    assert [str(port["containerPort"])] == values("EXPOSE")
    assert service_port["targetPort"] == port["name"]
    assert ingress["ports"] == [{"port": port["containerPort"]}]
    assert f"{pod(manifests)['securityContext']['runAsUser']}:10001" in values("USER")
    assert {mount["mountPath"] for mount in container(manifests)["volumeMounts"]} >= {"/tmp", "/cache"}


def test_probes_ask_routes_that_need_no_key_and_that_the_service_has() -> None:
    only = container(base())
    paths = {name: only[name]["httpGet"]["path"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    app = (ROOT / "service" / "logprobd" / "app.py").read_text()

    assert paths == {"startupProbe": "/healthz", "livenessProbe": "/healthz", "readinessProbe": "/readyz"}
    assert all(f'@router.get("{path}"' in app for path in paths.values())


def test_a_pod_has_the_time_to_drain() -> None:
    manifests = base()
    seconds = int(container(manifests)["lifecycle"]["preStop"]["exec"]["command"][1])
    drain = int(variables(manifests)["LOGPROBD_DRAIN_TIMEOUT"])

    assert pod(manifests)["terminationGracePeriodSeconds"] == seconds + drain + 10


def test_variables_of_services_do_not_reach_the_pod() -> None:
    """Kubernetes would set LOGPROBD_PORT=tcp://..., with which the service refuses to start."""
    manifests = base()

    assert of_kind(manifests, "Service")["metadata"]["name"] == "logprobd"
    assert pod(manifests)["enableServiceLinks"] is False


def test_a_pod_is_restricted() -> None:
    manifests = base()
    context = container(manifests)["securityContext"]

    assert pod(manifests)["securityContext"]["runAsNonRoot"]
    assert context["readOnlyRootFilesystem"]
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert not context["allowPrivilegeEscalation"]
    assert not pod(manifests)["automountServiceAccountToken"]


def test_no_key_is_in_a_file() -> None:
    assert "Secret" not in {manifest["kind"] for manifest in base()}
    assert not list(FOLDER.rglob("*.env"))


def test_everything_selects_the_same_pods() -> None:
    manifests = base()
    label = of_kind(manifests, "Deployment")["spec"]["template"]["metadata"]["labels"]
    monitor = yaml.safe_load((FOLDER / "monitoring" / "podmonitor.yaml").read_text())

    assert of_kind(manifests, "Service")["spec"]["selector"] == label
    for kind in ("Deployment", "PodDisruptionBudget"):
        assert of_kind(manifests, kind)["spec"]["selector"]["matchLabels"] == label
    assert of_kind(manifests, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"] == label
    assert monitor["spec"]["selector"]["matchLabels"] == label


def test_scaling_is_on_the_metric_that_the_adapter_makes() -> None:
    manifests = base()
    autoscaler = of_kind(manifests, "HorizontalPodAutoscaler")["spec"]
    (rule,) = yaml.safe_load((FOLDER / "monitoring" / "prometheus-adapter.yaml").read_text())["rules"]["custom"]
    (metric,) = autoscaler["metrics"]

    assert metric["pods"]["metric"]["name"] == rule["name"]["as"] == rule["seriesQuery"].partition("{")[0]
    assert autoscaler["scaleTargetRef"]["name"] == of_kind(manifests, "Deployment")["metadata"]["name"]
    assert "replicas" not in of_kind(manifests, "Deployment")["spec"]


def test_prometheus_brings_a_key_out_of_the_secret_of_the_pods() -> None:
    monitor = yaml.safe_load((FOLDER / "monitoring" / "podmonitor.yaml").read_text())
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    (port,) = container(base())["ports"]
    secrets = [entry["valueFrom"]["secretKeyRef"]["name"] for entry in container(base())["env"] if "valueFrom" in entry]

    assert endpoint["port"] == port["name"]
    assert [endpoint["authorization"]["credentials"]["name"]] == secrets


@needs_kubectl
def test_a_cpu_worker_fits_into_its_pod() -> None:
    """The limit counts beyond what Python and torch take, for which and for the HTTP process a GiB is left."""
    manifests = built("cpu")
    limits = container(manifests)["resources"]["limits"]
    worker = parse_memory_limit(variables(manifests)["LOGPROBD_MEMORY_LIMIT"]).bytes
    memory = TypeAdapter(ByteSize).validate_python(limits["memory"] + "B")

    assert worker is not None
    assert worker + 2**30 <= memory
    threads = next(entry for entry in container(manifests)["env"] if entry["name"] == "OMP_NUM_THREADS")
    assert threads["valueFrom"]["resourceFieldRef"]["resource"] == "limits.cpu"


@needs_kubectl
def test_a_gpu_pod_has_its_device_and_its_model() -> None:
    manifests = built("gpu")
    mounts = [mount["mountPath"] for mount in container(manifests)["volumeMounts"]]

    assert container(manifests)["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert any(str(Path(variables(manifests)["LOGPROBD_MODEL"]).parent) == mount for mount in mounts)
    assert of_kind(manifests, "Deployment")["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}


@needs_kubectl
def test_the_key_s_command_makes_the_secret_that_pods_and_prometheus_read() -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    blocks = [block for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL) if "create secret" in block]
    result = subprocess.run(["sh", "-ec", blocks[0]], capture_output=True, text=True, check=True)
    secret = yaml.safe_load(result.stdout)
    kubernetes_validate.validate(secret, NEWEST, strict=True)
    reference = next(entry for entry in container(base())["env"] if entry["name"] == "LOGPROBD_API_KEY")

    assert secret["metadata"]["name"] == reference["valueFrom"]["secretKeyRef"]["name"]
    assert set(secret["data"]) == {reference["valueFrom"]["secretKeyRef"]["key"], "metrics-key"}
