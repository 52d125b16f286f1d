"""Files of `docs/deploy/` for Prometheus, Grafana, systemd, nginx and Docker, compared with the server."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import promql_parser as promql
import pytest
import yaml
from jsonschema_rs import validator_for
from llm_serving.cli import main
from llm_serving.config import load_config
from llm_serving.config.sections.server import ServerConfig
from llm_serving.core.request import FinishReason
from llm_serving.core.request_class import STANDARD
from llm_serving.observability.component_metrics import REFUSALS
from llm_serving.observability.metrics import ReplicaCounts
from prometheus_client.parser import text_string_to_metric_families
from support.fakes import FakeEngine
from support.server_client import post, request

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "docs" / "deploy"
OF_PROMETHEUS = {"up"}
"""Series that Prometheus creates."""
TARGET_LABELS = {"instance": "127.0.0.1:8835", "job": "llm-serving"}
"""Labels that Prometheus adds to every series."""
VARIABLES = {"$__rate_interval": "5m", "$instance": ".*", "$job": ".*", "$model_name": ".*"}
STOCK_HISTOGRAMS = (
    "vllm:e2e_request_latency_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:time_to_first_token_seconds",
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
    "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
    "vllm:request_max_num_generation_tokens",
)
STOCK_SERIES = (
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
)
"""Series used by the twelve panels of vLLM's dashboard (`prometheus_grafana/grafana.json`)."""
Labels = dict[str, str]


@pytest.fixture(scope="module")
def series() -> dict[str, list[Labels]]:
    """Return the series of `/metrics` by name, from an application after successful and failed requests."""
    engine = FakeEngine()
    metrics = engine.metrics
    post(engine, "/v1/completions", {"prompt": "Hello"})
    for status in (401, 429, 500, 503):
        metrics.http.answered("POST", "/v1/completions", status)
    metrics.replicas = lambda: ReplicaCounts(1, 1)
    metrics.watch_agent(0, lambda: 1)
    metrics.record_load(1, 0, 0.5, 8)
    metrics.record_first_token(0.1)
    metrics.classes.record_first_token(0, 0.1)
    metrics.classes.refused(STANDARD, "slo")
    metrics.classes.predicted_s = lambda name: 0.5
    metrics.record_finished(
        FinishReason.STOP, e2e_s=1.0, ttft_s=0.5, num_prompt=4, num_output=2, queued_s=0.25, decode_s=0.5
    )
    found: dict[str, list[Labels]] = {name: [{}] for name in OF_PROMETHEUS}
    for family in text_string_to_metric_families(request(engine, "GET", "/metrics").text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return {name: [{**labels, **TARGET_LABELS} for labels in all_labels] for name, all_labels in found.items()}


def alerts() -> dict[str, dict]:
    groups = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def dashboard() -> dict:
    return json.loads((DEPLOY / "grafana-dashboard.json").read_text())


def expressions() -> Iterator[tuple[str, str]]:
    """Return (location, PromQL) of every alert, panel and variable."""
    for name, rule in alerts().items():
        yield name, rule["expr"]
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield f"{panel['title']} {target['refId']}", target["expr"]
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            selector = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["definition"])
            yield f"${variable['name']}", f"count by ({selector[2]}) ({selector[1]})"


def parse(text: str) -> object:
    for name, value in VARIABLES.items():
        text = text.replace(name, value)
    assert "$" not in text, f"a variable that the dashboard does not have: {text}"
    return promql.parse(text)


def problems_of(text: str, series: dict[str, list[Labels]]) -> list[str]:
    """Return the parts of an expression that match no series."""
    return _walk(parse(text), series)[1]


def _walk(node: object, series: dict[str, list[Labels]]) -> tuple[set[str], list[str]]:
    """Return the labels that the result of an expression may have, and the problems of its parts."""
    match node:
        case promql.VectorSelector():
            return _select(node, series)
        case promql.MatrixSelector():
            return _walk(node.vector_selector, series)
        case promql.AggregateExpr():
            labels, problems = _walk(node.expr, series)
            required = set(node.modifier.labels) if node.modifier is not None else set()
            assert node.modifier is None or node.modifier.type == promql.AggModifierType.By, str(node)
            return required, problems + [f"{label} is no label of {node.expr}" for label in required - labels]
        case promql.Call():
            parts = [_walk(argument, series) for argument in node.args]
            labels = set().union(*(labels for labels, _ in parts))
            problems = [problem for _, found in parts for problem in found]
            if node.func.name == "histogram_quantile" and "le" not in labels:
                problems.append(f"{node} has no le")
            return labels - {"le"} if node.func.name == "histogram_quantile" else labels, problems
        case promql.BinaryExpr():
            (left, problems), (right, more) = _walk(node.lhs, series), _walk(node.rhs, series)
            matching = node.modifier.matching if node.modifier is not None else None
            if matching is not None:
                missing = set(matching.labels) - (left & right)
                more = more + [f"{label} is not on both sides of {node}" for label in missing]
            elif not any(isinstance(_bare(side), promql.NumberLiteral) for side in (node.lhs, node.rhs)) and (
                left and right and left != right
            ):
                more = [*more, f"the sides of {node} have other labels"]
            return left or right, problems + more
        case promql.ParenExpr() | promql.UnaryExpr():
            return _walk(node.expr, series)
        case promql.NumberLiteral() | promql.StringLiteral():
            return set(), []
    raise AssertionError(f"an expression of a kind that this test does not know: {type(node).__name__}")


def _bare(node: object) -> object:
    return _bare(node.expr) if isinstance(node, promql.ParenExpr) else node


def _select(node: promql.VectorSelector, series: dict[str, list[Labels]]) -> tuple[set[str], list[str]]:
    if node.name not in series:
        return set(), [f"no metric {node.name}"]
    matching = [
        labels for labels in series[node.name] if all(_matches(each, labels) for each in node.matchers.matchers)
    ]
    names = {name for labels in series[node.name] for name in labels}
    problems = [f"{node.name} has no label {m.name}" for m in node.matchers.matchers if m.name not in names]
    if not matching and not problems:
        problems.append(f"nothing matches {node}")
    return names, problems


def _matches(matcher: promql.Matcher, labels: Labels) -> bool:
    value = labels.get(matcher.name, "")
    if matcher.op in (promql.MatchOp.Equal, promql.MatchOp.NotEqual):
        return (value == matcher.value) == (matcher.op == promql.MatchOp.Equal)
    return (re.fullmatch(matcher.value, value) is not None) == (matcher.op == promql.MatchOp.Re)


@pytest.mark.parametrize(("where", "text"), [pytest.param(*each, id=each[0]) for each in expressions()])
def test_every_expression_matches_existing_series(where, text, series):
    assert problems_of(text, series) == [], where


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("rate(vllm:no_such_total[5m])", "no metric vllm:no_such_total"),
        ('sum(vllm:num_requests_running{model="x"})', "vllm:num_requests_running has no label model"),
        ('llm_serving:http_requests_total{status="418"}', "nothing matches"),
        ("sum by (replica) (vllm:num_requests_running)", "replica is no label of vllm:num_requests_running"),
        ("histogram_quantile(0.5, rate(vllm:e2e_request_latency_seconds_sum[5m]))", "has no le"),
        ("vllm:num_requests_running > 0 and process_open_fds > 0", "have other labels"),
        ("vllm:num_requests_running and on (replica) process_open_fds", "replica is not on both sides"),
    ],
)
def test_expression_without_matching_series_is_detected(text, problem, series):
    (found,) = problems_of(text, series)
    assert problem in found


def test_every_series_is_documented_for_operators(series):
    table = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    documented = {name.partition(":")[2] or name for name in re.findall(r"`([a-z0-9_:]+)`", table)}
    names = {re.sub(r"_(bucket|sum|count|created)$", "", name.partition(":")[2]) for name in series if ":" in name}
    ends = tuple(each for each in documented if each.startswith("_"))
    assert sorted(name for name in names if name not in documented and not name.endswith(ends)) == []


def test_invalid_promql_is_detected(series):
    with pytest.raises(ValueError, match=r"."):
        problems_of("rate(vllm:num_requests_running[5m)", series)


def test_alert_has_a_severity_and_uses_existing_labels(series):
    for name, rule in alerts().items():
        assert rule["labels"]["severity"] in ("warning", "critical"), name
        labels, _ = _walk(parse(rule["expr"]), series)
        texts = " ".join(rule["annotations"].values())
        assert set(re.findall(r"\$labels\.(\w+)", texts)) <= labels, name
        assert rule["annotations"]["summary"]


def test_every_alert_is_documented_for_operators():
    text = (ROOT / "docs" / "guides" / "observability.md").read_text()
    assert [name for name in alerts() if f"`{name}`" not in text] == []


def test_every_reason_label_is_documented():
    reasons = [*FinishReason, *REFUSALS]
    rows = re.findall(r"^\| (.*?) \|", (ROOT / "docs" / "reference" / "metrics.md").read_text(), re.MULTILINE)
    assert [reason for reason in reasons if not any(f"`{reason}`" in row for row in rows)] == []


def test_panels_have_unique_ids_and_do_not_overlap():
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert {x for x, _ in cells} == set(range(24))


def test_every_request_histogram_is_on_the_dashboard(series):
    shown = " ".join(text for where, text in expressions() if where not in alerts())
    histograms = {name.removesuffix("_bucket") for name in series if name.endswith("_bucket")}
    contained = {"vllm:request_inference_time_seconds", "vllm:request_max_num_generation_tokens"}  # in displayed panels
    assert {name for name in histograms if name not in shown} == contained


@pytest.mark.parametrize("name", STOCK_HISTOGRAMS)
def test_histograms_of_the_vllm_dashboard_exist(name, series):
    quantile = f'histogram_quantile(0.99, sum by (le) (rate({name}_bucket{{model_name="demo"}}[5m])))'
    mean = f'rate({name}_sum{{model_name="demo"}}[5m]) / rate({name}_count{{model_name="demo"}}[5m])'
    assert problems_of(quantile, series) + problems_of(mean, series) == []


@pytest.mark.parametrize("name", STOCK_SERIES)
def test_other_series_of_the_vllm_dashboard_exist(name, series):
    assert problems_of(f'{name}{{model_name="demo"}}', series) == []


def test_labels_of_the_vllm_dashboard_exist(series):
    text = 'sum by (finished_reason) (increase(vllm:request_success_total{model_name="demo"}[5m]))'
    assert problems_of(text, series) == []


def words_of_command(text: str) -> list[str]:
    return shlex.split(text.replace("\\\n", " "))


def serve_arguments(words: list[str]) -> object:
    """Return the arguments of `llm-serving serve`, after checking their names and values."""
    assert words[0].endswith("/llm-serving")
    arguments = main._parser().parse_args(words[1:])
    load_config(None, arguments.overrides)
    return arguments


def unit() -> configparser.ConfigParser:
    parser = configparser.RawConfigParser(strict=False, delimiters=("=",), comment_prefixes=("#",))
    parser.optionxform = str
    parser.read_string((DEPLOY / "llm-serving.service").read_text().replace("\\\n", " "))
    return parser


def test_systemd_unit_starts_a_server_and_waits_for_its_end(tmp_path):
    service = unit()["Service"]
    logs = f"/var/log/{service['LogsDirectory']}"  # systemd creates it before it starts the server
    words = words_of_command(service["ExecStart"])
    arguments = serve_arguments([word.replace(logs, str(tmp_path)) for word in words])
    assert str(arguments.config) == "/etc/llm-serving/serving.yaml"
    assert float(service["TimeoutStopSec"]) > ServerConfig().shutdown_timeout_s
    assert int(service["RestartPreventExitStatus"]) == main.EXIT_CONFIG
    assert (service["Restart"], service["NoNewPrivileges"]) == ("on-failure", "yes")


def test_every_exit_code_is_documented_for_operators():
    table = (ROOT / "docs" / "reference" / "error_codes.md").read_text().split("## Exit codes")[1].split("##")[0]
    documented = {
        int(code)
        for line in table.splitlines()
        for code in re.findall(r"\d+", line.split("|")[1] if "|" in line else "")
    }
    ours = {getattr(main, name) for name in dir(main) if name.startswith("EXIT_") and name != "EXIT_CODES"}
    assert ours | {0} == documented - {137, 143}


def test_docker_image_starts_a_server():
    lines = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    commands = {line.split()[0]: line.partition(" ")[2] for line in lines if line.strip()}
    words = [*json.loads(commands["ENTRYPOINT"]), *json.loads(commands["CMD"])]
    arguments = serve_arguments(words)
    assert (ROOT / arguments.config.relative_to("/opt/llm-serving")).exists()
    for line in lines:
        if line.startswith("COPY"):
            assert all((ROOT / source).exists() for source in line.split()[1:-1]), line
    assert commands["EXPOSE"] == str(ServerConfig().server_port)


def test_kubernetes_manifest_is_consistent_with_the_server(tmp_path):
    cluster, service = yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text())
    head, (workers,) = cluster["spec"]["headGroupSpec"], cluster["spec"]["workerGroupSpecs"]
    ray_head, master = head["template"]["spec"]["containers"]
    (work_agent,) = workers["template"]["spec"]["containers"]
    assert {each["image"] for each in (ray_head, master, work_agent)} == {"registry.example/llm-serving:ray"}
    pinned = tomllib.loads((ROOT / "llm-serving" / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert f"ray=={cluster['spec']['rayVersion']}" in pinned["ray"]
    # Pods are probed over HTTP; without its extra, Ray's agent does not answer.
    assert f"ray[default]=={cluster['spec']['rayVersion']}" in pinned["kuberay"]
    assert len(pinned["kuberay"]) == len(pinned["ray"])
    assert "--build-arg EXTRAS=kuberay" in (DEPLOY / "kuberay.yaml").read_text()

    secret = tmp_path / "secret"
    secret.write_text("s" * 32)
    secret.chmod(0o600)
    command = [each.replace("/etc/llm-serving-cluster/secret", str(secret)) for each in master["command"]]
    assert command != master["command"]
    config = load_config(None, serve_arguments(command).overrides).cluster
    assert config.engine == "ray"
    assert config.address == "$(POD_IP):6379"
    assert config.replicas == workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"]
    assert config.cpus_per_replica == int(workers["rayStartParams"]["num-cpus"])
    assert str(config.cpus_per_replica) == work_agent["resources"]["limits"]["cpu"]

    mounts = {each["mountPath"]: each["name"] for each in work_agent["volumeMounts"]}
    assert master["volumeMounts"] == work_agent["volumeMounts"], "a model or secret at another path"
    volumes = {each["name"]: each for each in workers["template"]["spec"]["volumes"]}
    assert set(mounts.values()) == set(volumes)
    assert {"/etc/llm-serving-cluster", "/etc/llm-serving", "/model"} <= set(mounts)
    assert not volumes["cluster-secret"]["secret"]["defaultMode"] & 0o007, (
        "a secret that other users can read is refused"
    )
    assert service["spec"]["ports"][0]["port"] == master["ports"][0]["containerPort"] == ServerConfig().server_port
    assert service["spec"]["selector"].items() <= head["template"]["metadata"]["labels"].items()


def ray_cluster() -> dict:
    cluster = next(yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text()))
    return json.loads(json.dumps(cluster))  # resolve YAML anchors


def problems_of_ray_cluster(cluster: dict) -> list[str]:
    schema = json.loads((ROOT / "tests" / "support" / "ray_cluster_schema.json").read_text())
    return [error.message for error in validator_for(schema).iter_errors(cluster)]


def test_kubernetes_manifest_fits_the_kuberay_schema():
    assert problems_of_ray_cluster(ray_cluster()) == []


@pytest.mark.parametrize(
    ("group", "change", "problem"),
    [
        ("headGroupSpec", lambda group: group.update(serviceKind="ClusterIP"), "serviceKind"),
        ("headGroupSpec", lambda group: group.pop("template"), "template"),
        ("workerGroupSpecs", lambda group: group.update(replicas="2"), "integer"),
        ("workerGroupSpecs", lambda group: group["rayStartParams"].update({"num-cpus": 8}), "string"),
        ("workerGroupSpecs", lambda group: group["template"]["spec"]["containers"][0].pop("name"), "name"),
        ("workerGroupSpecs", lambda group: group["template"]["spec"]["containers"][0].update(cmd=[]), "cmd"),
        ("workerGroupSpecs", lambda group: group["template"]["spec"]["volumes"][0].update(emptyDir=[]), "object"),
    ],
)
def test_manifest_that_kuberay_would_refuse_is_detected(group, change, problem):
    cluster = ray_cluster()
    found = cluster["spec"][group]
    change(found[0] if isinstance(found, list) else found)
    (noticed,) = problems_of_ray_cluster(cluster)
    assert problem in noticed


def test_nginx_configuration_passes_streams_and_fits_the_server():
    text = re.sub(r"#.*", "", (DEPLOY / "nginx.conf").read_text())
    directives = dict(re.findall(r"^\s*([a-z_0-9]+)\s+([^;{]+);", text, re.M))
    assert directives["proxy_buffering"] == "off"
    assert directives["proxy_http_version"] == "1.1"
    assert int(directives["client_max_body_size"].removesuffix("m")) * 2**20 == ServerConfig().max_request_body_bytes
    assert f"127.0.0.1:{ServerConfig().server_port}" in text
    locations = re.findall(r"location [^{]*\{([^}]*)\}", text)
    assert len(locations) == 2
    for location in locations:  # otherwise the server gets the name of the upstream as host, which it refuses
        assert re.search(r"^\s*proxy_set_header Host \$host;", location, re.M)
