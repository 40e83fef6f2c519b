"""A Prometheus of its own on a free port that scrapes a live server: for tests and the picture of the dashboards."""

import json
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.server import LiveServer


def filled_in(expression: str, interval: str = "1m") -> str:
    """A dashboard's expression as Grafana sends it when everything is selected."""
    expression = expression.replace("$__rate_interval", interval)
    for variable in ("$job", "$model_name", "$instance", "$engine"):
        expression = expression.replace(variable, ".*")
    assert "$" not in expression, expression
    return expression


class LivePrometheus:
    """Starts at once; ``close`` afterwards. ``rules``: a file of recording rules and alerts."""

    def __init__(self, server: LiveServer, folder: Path, rules: Path | None = None, seconds: int = 1) -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        self._url, self.log = f"http://127.0.0.1:{port}/api/v1/", folder / "log"
        target = server.url.removeprefix("http://")
        config = {
            "global": {"scrape_interval": f"{seconds}s", "evaluation_interval": f"{seconds}s"},
            "scrape_configs": [{"job_name": "vericache", "static_configs": [{"targets": [target]}]}],
            "rule_files": [] if rules is None else [str(rules.resolve())],
        }
        (folder / "prometheus.yml").write_text(json.dumps(config), encoding="utf-8")
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
                 f"--web.listen-address=127.0.0.1:{port}"],
                stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def ask(self, path: str, **parameters: Any) -> Any:
        """``data`` of the answer. Raises OSError while Prometheus starts, and for an expression it refuses."""
        asked = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self._url}{path}?{asked}", timeout=10) as answer:
            return json.load(answer)["data"]

    def query(self, expression: str) -> list[tuple[Mapping[str, str], float]]:
        """Labels and value of each series, now; none while Prometheus starts."""
        try:
            found = self.ask("query", query=expression)["result"]
        except urllib.error.HTTPError as error:
            if error.code < 500:
                raise
            return []
        except urllib.error.URLError:
            return []
        return [(each["metric"], float(each["value"][1])) for each in found]

    def history(
        self, expression: str, start: float, end: float, step: int
    ) -> Iterator[tuple[Mapping[str, str], Sequence[tuple[float, float]]]]:
        """Labels, and (unix seconds, value) at every ``step`` seconds, of each series."""
        found = self.ask("query_range", query=expression, start=start, end=end, step=step)["result"]
        for each in found:
            yield each["metric"], [(float(at), float(value)) for at, value in each["values"]]

    def wait_for(self, expression: str, value: float, seconds: float = 60) -> None:
        """Until the one series of ``expression`` has ``value``. Raises TimeoutError."""
        deadline, found = time.monotonic() + seconds, self.query(expression)
        while [v for _, v in found] != [value]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{expression} is {found}, expected {value}: {self.log.read_text()[-2000:]}")
            time.sleep(0.5)
            found = self.query(expression)
