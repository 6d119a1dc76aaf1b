"""compose, Prometheus and Grafana: every file, port, variable and metric that they name is there."""

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from dockerfile import values
from logprobd.settings import ENV_PREFIX, ServeSettings
from pages import all_commands
from running import ROOT, Running, free_port, running_service

DEPLOY = ROOT / "deploy"
BOARD = DEPLOY / "grafana" / "dashboards" / "logprobd.json"
KEY = "metrics"
# What Prometheus itself writes about a target.
OF_PROMETHEUS = {"up"}
LABELS_OF_PROMETHEUS = {"job", "instance", "le"}

Labels = dict[str, set[str]]


def compose() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return content


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"]
    return list(group["rules"])


def scrape() -> dict[str, Any]:
    (job,) = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    return dict(job)


def panels() -> list[dict[str, Any]]:
    return list(json.loads(BOARD.read_text())["panels"])


def expressions() -> list[str]:
    """Every expression of the alerts, the dashboard and the pages, Grafana's variables filled in."""
    of_panels = [target["expr"] for panel in panels() for target in panel["targets"]]
    pages = [page.read_text() for page in (ROOT / "docs").glob("*.md")]
    of_pages = [block for page in pages for block in re.findall(r"```promql\n(.*?)```", page, re.DOTALL)]
    filled = [text.replace("$__rate_interval", "5m").replace("$instance", ".*") for text in of_panels]
    return [*(rule["expr"] for rule in rules()), *filled, *of_pages]


def series_of(expression: str) -> Labels:
    """The series that an expression names, with the labels that it asks of each."""
    found: Labels = {}
    for selector in selectors(promql_parser.parse(expression)):
        matchers = {matcher.name for matcher in selector.matchers.matchers}
        found.setdefault(selector.name, set()).update(matchers)
    return found


def selectors(node: Any) -> Iterator[Any]:
    """Every vector selector under a node of a parsed expression."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node
    children = [getattr(node, name, None) for name in ("expr", "lhs", "rhs", "vector_selector", "args", "param")]
    for child in children:
        for each in child if isinstance(child, list) else [child]:
            if each is not None:
                yield from selectors(each)


def grouped_by(expression: str) -> set[str]:
    """The labels after `by` and `on`, and those in templates."""
    return {label.strip() for group in re.findall(r"\b(?:by|on) *\((.*?)\)", expression) for label in group.split(",")}


@pytest.fixture(scope="module")
def service(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A service with a key, that has answered a request."""
    log = tmp_path_factory.mktemp("metrics") / "log"
    with running_service(log, "--model", str(tiny_folder), LOGPROBD_API_KEY=f"trainer,{KEY}") as running:
        ask(running)
        yield running


def authorization() -> dict[str, str]:
    return {"Authorization": f"Bearer {KEY}"}


def ask(running: Running) -> None:
    body = {"prompt": [1, 2], "completions": [[3, 4], [5]]}
    httpx.post(f"{running.url}/logprobs", json=body, headers=authorization(), timeout=60).raise_for_status()


def exported(running: Running) -> Labels:
    """Every series that the service may write, with its labels as far as it has written any."""
    text = httpx.get(f"{running.url}/metrics", headers=authorization()).text
    found: Labels = {}
    for family in text_string_to_metric_families(text):
        endings = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("_total",)}.get(family.type, ("",))
        for ending in endings:
            found[family.name + ending] = set()
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_every_metric_that_is_asked_for_is_exported(service: Running) -> None:
    known = exported(service)
    for expression in expressions():
        for name, labels in series_of(expression).items():
            assert name in known.keys() | OF_PROMETHEUS, expression
            if known.get(name):
                assert labels <= known[name] | LABELS_OF_PROMETHEUS, expression


def test_every_label_that_is_grouped_by_or_shown_is_exported(service: Running) -> None:
    known = set().union(*exported(service).values()) | LABELS_OF_PROMETHEUS
    texts = [*(text for rule in rules() for text in rule["annotations"].values()), BOARD.read_text()]
    shown = {
        label for text in texts for label in re.findall(r"\$labels\.(\w+)|{{(\w+)}}", text) for label in label if label
    }

    assert shown
    assert shown | set().union(*map(grouped_by, expressions())) <= known


def test_every_metric_is_shown_or_alerted_on(service: Running) -> None:
    asked = {plain(name) for expression in expressions() for name in series_of(expression)}
    ours = {name for name in exported(service) if name.startswith("logprobd_") and not name.endswith("_created")}

    assert {plain(name) for name in ours} <= asked


def plain(series: str) -> str:
    """The metric that a series belongs to."""
    return re.sub("_(bucket|sum|count)$", "", series)


def test_the_parser_finds_every_selector() -> None:
    nested = 'sum by (a) (rate(x_total{b="1"}[5m])) / on (a) y > 0 or vector(0) + histogram_quantile(0.9, z_bucket)'

    assert series_of(nested) == {"x_total": {"b"}, "y": set(), "z_bucket": set()}
    assert grouped_by(nested) == {"a"}


def test_prometheus_asks_where_the_service_answers() -> None:
    job = scrape()
    ((target,),) = [config["targets"] for config in job["static_configs"]]

    assert target == f"logprobd:{values('EXPOSE')[0]}"
    assert "logprobd" in compose()["services"]
    assert all(f'job="{job["job_name"]}"' in text for text in expressions() if "job=" in text)


def test_prometheus_brings_one_of_the_service_s_keys() -> None:
    name = scrape()["authorization"]["credentials_file"].removeprefix("/run/secrets/")
    variable = compose()["secrets"][name]["environment"]

    assert compose()["services"]["prometheus"]["secrets"] == [name]
    assert f"${{{variable}:?" in compose()["services"]["logprobd"]["environment"]["LOGPROBD_API_KEY"]


@pytest.mark.parametrize("file", ["compose.yaml", "compose.gpu.yaml"])
def test_compose_names_only_what_is_there(file: str) -> None:
    content = yaml.safe_load((DEPLOY / file).read_text())
    arguments = {value.partition("=")[0] for value in values("ARG")}
    for service in content["services"].values():
        assert set(service.get("build", {}).get("args", {})) <= arguments
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert source in content["volumes"] or (DEPLOY / source).exists(), volume


def test_compose_starts_the_service_closed_and_gives_it_time_to_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    service = compose()["services"]["logprobd"]
    for name, value in service["environment"].items():
        assert name.removeprefix(ENV_PREFIX).lower() in ServeSettings.model_fields
        monkeypatch.setenv(name, value)
    settings = ServeSettings()

    assert not settings.no_auth
    assert len(settings.api_keys) == 2
    assert service["ports"] == [f"8000:{settings.port}"]
    assert int(service["stop_grace_period"].removesuffix("s")) >= settings.drain_timeout + 10
    assert service["read_only"]


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    provisioning = DEPLOY / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "logprobd.yaml").read_text())["providers"]
    mounted = [volume.split(":")[1] for volume in compose()["services"]["grafana"]["volumes"]]
    used = {target["datasource"]["uid"] for panel in panels() for target in panel["targets"]}

    assert used == {source["uid"]}
    assert source["url"] == "http://prometheus:9090"
    assert provider["options"]["path"] in mounted


def test_the_panels_fill_the_dashboard_without_overlap() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not own & cells, panel["title"]
        cells |= own

    assert max(x for x, _ in cells) == 23
    assert len({panel["id"] for panel in panels()}) == len(panels())


def test_every_alert_says_what_it_means() -> None:
    flags = {"--" + name.replace("_", "-") for name in ServeSettings.model_fields}
    for rule in rules():
        assert set(rule["annotations"]) == {"summary", "description"}
        assert set(re.findall(r"--[a-z-]+", rule["annotations"]["description"])) <= flags


def program(name: str) -> str:
    """A program of Prometheus': on the PATH, or where `make prometheus` puts it."""
    found = shutil.which(name, path=f"{os.environ['PATH']}:{ROOT / '.venv/prometheus/usr/bin'}")
    if found is None:
        pytest.skip(f"{name} is not installed: make prometheus")
    return found


def test_the_alerts_fire_when_they_should() -> None:
    (command,) = all_commands("promtool")
    words = [program("promtool"), *command.split()[1:]]
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)

    assert result.returncode == 0, result.stdout + result.stderr


@contextmanager
def prometheus(running: Running, folder: Path) -> Iterator[str]:
    """A real Prometheus with the deployed configuration, but for the target's address, the key's file and the pace."""
    (folder / "key").write_text(KEY)
    text = (DEPLOY / "prometheus" / "prometheus.yml").read_text().replace("15s", "1s")
    text = text.replace("/run/secrets/metrics_key", str(folder / "key"))
    (folder / "prometheus.yml").write_text(text.replace("logprobd:8000", running.url.removeprefix("http://")))
    shutil.copy(DEPLOY / "prometheus" / "alerts.yml", folder)
    address = f"127.0.0.1:{free_port()}"
    places = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("wb") as log:
        command = [program("prometheus"), *places, f"--web.listen-address={address}"]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(30)


def query(url: str, expression: str) -> list[Any]:
    reply = httpx.get(f"{url}/api/v1/query", params={"query": expression})
    assert reply.status_code == 200, reply.text
    return list(reply.json()["data"]["result"])


def wait_until_scraped(url: str, log: Path, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if query(url, 'count_over_time(up{job="logprobd"}[1m]) > 2'):
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise AssertionError(f"Prometheus never asked the service; its log:\n{log.read_text()}")


def test_a_real_prometheus_answers_every_expression(service: Running, tmp_path: Path) -> None:
    with prometheus(service, tmp_path) as url:
        wait_until_scraped(url, tmp_path / "log")
        ask(service)
        alerts = httpx.get(f"{url}/api/v1/rules").json()["data"]["groups"][0]["rules"]

        assert query(url, 'up{job="logprobd"} == 1')
        assert query(url, "logprobd_ready == 1")
        assert [rule["name"] for rule in alerts] == [rule["alert"] for rule in rules()]
        for expression in expressions():
            query(url, expression)
