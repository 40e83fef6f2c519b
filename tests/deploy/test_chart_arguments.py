"""The command line that the chart writes is one that `vericache serve` takes, and nothing can be said twice."""

from typing import Any

import pytest
import yaml
from helm_python.errors import HelmRenderError
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.deploy.charting import EXAMPLES, Object, container, rendered
from tests.deploy.features import FEATURES
from vericache.cli import add_flags

VALUES = {path.stem: yaml.safe_load(path.read_text()) for path in EXAMPLES} | FEATURES


@pytest.fixture(scope="module")
def parser() -> FlexibleArgumentParser:
    found = make_arg_parser(FlexibleArgumentParser(prog="vericache serve"))
    add_flags(found)
    return found


def arguments(values: Object) -> list[str]:
    words: list[str] = container(rendered(values))["args"]
    return words


@pytest.mark.parametrize("name", VALUES)
def test_the_server_takes_the_arguments(name: str, parser: FlexibleArgumentParser) -> None:
    server = VALUES[name].get("server", {})
    found: Any = parser.parse_args(arguments(VALUES[name]))
    assert found.model_tag == server.get("model", "HuggingFaceTB/SmolLM2-135M-Instruct")
    assert found.port == 8000
    assert found.max_model_len == server.get("maxModelLen")
    assert found.max_num_seqs == server.get("maxNumSeqs")
    assert found.tensor_parallel_size == server.get("tensorParallelSize", 1)
    assert found.shutdown_timeout == server.get("shutdownTimeoutSeconds", 120)
    assert found.served_model_name == ([server["servedModelName"]] if "servedModelName" in server else None)
    gib = server.get("kvCacheMemoryGib")
    assert found.kv_cache_memory_bytes == (None if gib is None else int(gib * 2**30))
    assert str(found.vericache_config) == "/etc/vericache/vericache.yaml"


def test_what_the_chart_passes_cannot_be_passed_again(parser: FlexibleArgumentParser) -> None:
    """Under any of a flag's names: the last one would win, and what was checked would not be what runs."""
    passed = {word.partition("=")[0] for word in arguments(FEATURES["server"]) if word.startswith("--")}
    passed -= {"--tool-call-parser", "--enable-auto-tool-choice"}  # extraArgs of that feature
    for action in parser._actions:
        if passed & set(action.option_strings) and action.dest != "vericache_config":
            for flag in action.option_strings:
                spelled = {flag, f"{flag}=1"}
                if flag.startswith("--"):
                    spelled |= {"--" + flag[2:].replace("-", "_"), flag[:-1]}  # argparse takes beginnings, too
                for word in spelled:
                    with pytest.raises(HelmRenderError, match=r"server\.extraArgs has"):
                        rendered({"server": {"extraArgs": [word]}})
    with pytest.raises(HelmRenderError, match=r"set vericache\.ratio instead"):
        rendered({"server": {"extraArgs": ["--vericache-ratio", "0.5"]}})
