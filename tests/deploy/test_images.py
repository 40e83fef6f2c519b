"""Images and compose file. Nothing here builds an image: the files are linted, and the steps they run are run."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml

from deploy.helm import CHART
from tests.deploy.charting import container, rendered
from vericache.config import VeriCacheConfig

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "deploy" / "docker"
DOCKERFILES = sorted(DOCKER.glob("Dockerfile.*"))
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
CUDA = yaml.safe_load((DOCKER / "compose.cuda.yaml").read_text())
by_name = pytest.mark.parametrize("file", DOCKERFILES, ids=lambda path: path.name)


def instructions(file: Path) -> list[tuple[str, str]]:
    """(INSTRUCTION, arguments) in order, continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", file.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in text.splitlines()) if word]


def final_stage(file: Path) -> list[tuple[str, str]]:
    found = instructions(file)
    last = max(i for i, (word, _) in enumerate(found) if word == "FROM")
    return found[last:]


@by_name
def test_hadolint_finds_nothing(file: Path) -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([hadolint, "--failure-threshold", "info", file], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@by_name
def test_base_images_are_pinned(file: Path) -> None:
    bases = [rest.split()[0] for word, rest in instructions(file) if word == "FROM"]
    assert len(bases) == 2  # what builds is not what runs
    for base in bases:
        assert re.search(r":v?\d+\.\d+\.\d+", base), base


def test_the_cuda_image_has_the_supported_vllm() -> None:
    (_, base), *_ = final_stage(DOCKER / "Dockerfile.cuda")
    assert base == "vllm/vllm-openai:v0.32.0"


@by_name
def test_it_runs_without_root_and_writes_to_the_cache_only(file: Path) -> None:
    stage = final_stage(file)
    assert [rest for word, rest in stage if word == "USER"] == ["1000:1000"]  # a number: runAsNonRoot can check it
    environment = " ".join(rest for word, rest in stage if word == "ENV")
    folders = re.findall(r"\w+=(/\S*)", environment.replace("PATH=/opt/vericache/bin:$PATH", ""))
    assert folders
    assert all(folder == "/cache" or folder.startswith("/cache/") for folder in folders)
    assert "install -d -o 1000 -g 1000 /cache" in " ".join(rest for word, rest in stage if word == "RUN")
    before = [word for word, _ in stage[: [word for word, _ in stage].index("USER")]]
    assert "ENTRYPOINT" not in before


@by_name
def test_the_chart_fits_the_image(file: Path) -> None:
    stage = dict(final_stage(file))
    assert json.loads(stage["ENTRYPOINT"]) == ["vericache", "serve"]
    server = container(rendered({} if file.suffix == ".cuda" else {"device": "cpu", "gpu": {"count": 0}}))
    assert "command" not in server
    assert f"--port={stage['EXPOSE']}" in server["args"]
    assert server["ports"][0]["containerPort"] == int(stage["EXPOSE"])
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    assert server["image"] == f"vericache:{version}-{file.suffix[1:]}"
    assert f"-t {server['image']} " in file.read_text()
    assert f'version = "{version}"' in (ROOT / "pyproject.toml").read_text()


@pytest.fixture
def health() -> Iterator[Any]:
    """A port answers with the status it is given."""

    class Handler(BaseHTTPRequestHandler):
        status, port = 200, 0

        def do_GET(self) -> None:
            self.send_response(Handler.status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    Handler.port = server.server_port
    Thread(target=server.serve_forever, daemon=True).start()
    yield Handler
    server.shutdown()
    server.server_close()


@by_name
def test_the_healthcheck_follows_health(file: Path, health: Any) -> None:
    check = dict(final_stage(file))["HEALTHCHECK"]
    python, *arguments = json.loads(check[check.index("[") :].replace(":8000/", f":{health.port}/"))
    assert python == "python3"
    assert f":{health.port}/health" in arguments[-1]
    for status, expected in ((200, 0), (503, 1)):
        health.status = status
        assert subprocess.run([sys.executable, *arguments], capture_output=True).returncode == expected


# -- what is installed -------------------------------------------------------------------------------------


def script(step: str, *arguments: object, cwd: Path, dry: bool = False) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable} | ({"PIP_DRY_RUN": "1"} if dry else {})
    words = ["sh", str(DOCKER / "install.sh"), step, *map(str, arguments)]
    return subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the first stage of the CPU image copies, and its .dockerignore lets through."""
    folder = tmp_path_factory.mktemp("sources")
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for word, rest in instructions(DOCKER / "Dockerfile.cpu"):
        if word != "COPY" or rest.startswith("--from"):
            continue
        *sources, target = rest.split()
        for source in sources:
            assert source in allowed, f".dockerignore hides {source}"
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, folder / target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                (folder / target).mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / source, folder / target)
    return folder


@pytest.fixture(scope="module")
def wheel(copied: Path) -> Path:
    done = script("wheel", cwd=copied)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = (copied / "dist").glob("*.whl")
    return found


@pytest.mark.xdist_group("wheel")
def test_the_wheel_has_every_module_and_every_data_file(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for package in ("compressors", "scheduler", "server", "vericache"):
        for path in (ROOT / package).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                assert str(path.relative_to(ROOT)) in names


@pytest.mark.xdist_group("wheel")
def test_vllms_environment_lacks_nothing_for_the_wheel(wheel: Path) -> None:
    """The step of the CUDA image, in an environment that has vLLM: no index is asked, so all must be there."""
    done = script("cuda", wheel, cwd=wheel.parent, dry=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Collecting" not in done.stdout


@pytest.mark.xdist_group("wheel")
def test_a_dependency_that_the_image_lacks_is_named(wheel: Path, tmp_path: Path) -> None:
    words = ["sh", DOCKER / "install.sh", "cuda", wheel]
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "PIP_TARGET": str(tmp_path),
    }  # what is installed does not count
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    assert "No matching distribution found for" in done.stderr


@pytest.mark.xdist_group("wheel")
def test_the_cpu_image_installs_what_is_tested_here(wheel: Path, copied: Path) -> None:
    """The step of the CPU image in this environment: every pin is what the tests run on, and nothing else comes."""
    done = script("cpu", wheel, cwd=copied, dry=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for line in re.findall(r"Would install (.*)", done.stdout):
        assert re.fullmatch(r"vericache-\S+", line), line


def test_an_unknown_step_is_an_error() -> None:
    done = script("rocm", cwd=ROOT)
    assert done.returncode == 2
    assert "got 'rocm', expected wheel, cuda WHEEL or cpu WHEEL" in done.stderr


# -- compose -------------------------------------------------------------------------------------------------


def services() -> Iterator[tuple[str, dict[str, Any]]]:
    yield from COMPOSE["services"].items()


@pytest.mark.parametrize(("name", "service"), services(), ids=[name for name, _ in services()])
def test_services_are_pinned_and_confined(name: str, service: dict[str, Any]) -> None:
    assert re.search(r":v?\d+\.\d+\.\d+", service["image"])
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    for volume in service["volumes"]:
        source, target, *mode = volume.split(":")
        if source.startswith("."):
            assert (DOCKER / source).exists(), source
            assert mode == ["ro"], f"{target} is part of the sources"
        else:
            assert source in COMPOSE["volumes"]


def test_passwords_and_keys_have_no_default() -> None:
    for _, service in services():
        for variable, value in service.get("environment", {}).items():
            if re.search("KEY|PASSWORD", variable):
                assert ":?" in value, f"{variable} must be asked for"


@pytest.mark.parametrize("compose", [COMPOSE, CUDA], ids=["cpu", "cuda"])
def test_the_servers_flags_are_settings(compose: dict[str, Any]) -> None:
    given = [word for word in compose["services"]["server"]["command"] if word.startswith("--vericache-")]
    names = {word.removeprefix("--vericache-").partition("=")[0].replace("-", "_") for word in given}
    assert names <= set(VeriCacheConfig.model_fields)
    assert (DOCKER / COMPOSE["services"]["server"]["build"]["context"]).resolve() == ROOT
    assert (ROOT / compose["services"]["server"]["build"]["dockerfile"]).exists()


def test_the_server_may_lock_memory_and_drain() -> None:
    server = COMPOSE["services"]["server"]
    assert server["ulimits"]["memlock"] == -1
    (drain,) = [int(w.partition("=")[2]) for w in server["command"] if w.startswith("--shutdown-timeout=")]
    assert int(server["stop_grace_period"].removesuffix("s")) >= drain + 10


def test_prometheus_and_grafana_find_what_is_mounted() -> None:
    mounts = {
        target: (DOCKER / source).resolve()
        for _, service in services()
        for source, target, *_ in (volume.split(":") for volume in service["volumes"])
    }
    prometheus = yaml.safe_load(mounts["/etc/prometheus/prometheus.yml"].read_text())
    assert prometheus["rule_files"] == ["/etc/prometheus/rules/*.yaml"]
    assert list(mounts["/etc/prometheus/rules"].glob("*.yaml"))
    (job,) = prometheus["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["server:8000"]}]
    provisioning = mounts["/etc/grafana/provisioning"]
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "vericache.yaml").read_text())["providers"]
    home = COMPOSE["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    folder = mounts[provider["options"]["path"]]
    assert (folder / Path(home).name).exists()
