"""What a client may ask for one request."""

import math
from typing import Any

import pytest

from vericache.certified.certificate import Bound
from vericache.config import VeriCacheConfig
from vericache.errors import RequestError
from vericache.request_options import RequestOptions, RequestSettings

ALL = tuple(RequestOptions.model_fields)
OPEN = VeriCacheConfig(request_options=ALL)


def test_without_options_the_servers_settings_hold() -> None:
    for extra in (None, {}, {"other": 1}):
        settings = RequestSettings(OPEN, extra)
        assert settings.config is OPEN
        assert not settings.off
        assert settings.min_prompt_tokens == OPEN.min_prompt_tokens


def test_options_change_only_what_they_name() -> None:
    asked = {"vericache_draft_length": 7, "vericache_compressor": "snapkv", "vericache_counts": "per_layer"}
    settings = RequestSettings(OPEN, {**asked, "vericache_ratio": 0.5, "vericache_selector": "pareto"})
    changed = {"draft_length": 7, "compressor": "snapkv", "counts": "per_layer", "ratio": 0.5, "selector": "pareto"}
    assert settings.config == OPEN.model_copy(update=changed)


def test_another_method_does_not_inherit_the_servers_options() -> None:
    server = VeriCacheConfig(compressor="kvzip", compressor_options={"chunk": 512}, request_options=ALL)
    assert RequestSettings(server, {"vericache_ratio": 0.5}).config.compressor_options == {"chunk": 512}
    assert RequestSettings(server, {"vericache_compressor": "snapkv"}).config.compressor_options == {}


def test_another_method_spreads_its_tokens_by_itself_unless_the_server_says_how() -> None:
    asked = {"vericache_compressor": "streaming_llm"}
    assert RequestSettings(OPEN, asked).config.method.counts == "uniform"
    server = OPEN.model_copy(update={"counts": "pyramid"})
    assert RequestSettings(server, asked).config.method.counts == "pyramid"
    assert RequestSettings(server, {"vericache_counts": "auto"}).config.method.counts == "per_head"


def test_off_and_draft() -> None:
    assert RequestSettings(OPEN, {"vericache_mode": "off"}).off
    forced = RequestSettings(OPEN, {"vericache_mode": "draft", "vericache_ratio": 0.1})
    assert forced.min_prompt_tokens == math.ceil((OPEN.sinks + OPEN.recent) / 0.1)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("vericache_mode", "fast", "'auto', 'draft', 'off' or 'certified'"),
        ("vericache_mode", 1, "'auto', 'draft', 'off' or 'certified'"),
        ("vericache_draft_length", 0, "greater than or equal to 1"),
        ("vericache_draft_length", "7", "integer"),
        ("vericache_draft_length", 63, "window of 64"),
        ("vericache_ratio", 0.0, "greater than 0"),
        ("vericache_ratio", float("nan"), "got nan"),
        ("vericache_ratio", 0.001, "fewer than sinks"),
        ("vericache_compressor", "kvzipp", "kvzip"),
        ("vericache_compressor", "pyramidkv", "cannot allocate counts 'per_head'"),
        ("vericache_counts", "per_token", "uniform"),
        ("vericache_selector", "best", "poisson"),
        ("vericache_bound", "ouput", "got 'ouput'; did you mean 'output'?"),
        ("vericache_bound", "nominator", "got 'nominator'; did you mean 'denominator'?"),
        ("vericache_bound", "all", "'denominator' or 'output', got 'all'"),
        ("vericache_bound", 1, "'denominator' or 'output', got 1"),
        ("vericache_bound", "output", "holds for vericache_mode certified"),
        ("vericache_epsilon", 0.0, "greater than 0"),
        ("vericache_epsilon", -0.1, "greater than 0"),
        ("vericache_epsilon", 1.0, "less than 1"),
        ("vericache_epsilon", 0.1, "holds for vericache_mode certified"),
        ("vericache_delta", 0.0, "greater than 0"),
        ("vericache_delta", 1.0, "less than 1"),
        ("vericache_delta", 0.1, "holds for vericache_mode certified"),
        ("vericache_slot", 3, "is not an option"),
        ("vericache_draft_lenght", 3, "vericache_draft_length"),
    ],
)
def test_a_wrong_option_is_named(name: str, value: Any, message: str) -> None:
    with pytest.raises(RequestError) as error:
        RequestSettings(OPEN.model_copy(update={"counts": "per_head"}), {name: value})
    assert error.value.field == name
    assert message in str(error.value)


@pytest.mark.parametrize("name", ALL)
def test_what_the_server_does_not_allow_is_refused(name: str) -> None:
    allowed = tuple(n for n in ALL if n != name)
    with pytest.raises(RequestError, match="not allowed by this server") as error:
        RequestSettings(VeriCacheConfig(request_options=allowed), {f"vericache_{name}": "auto"})
    assert error.value.field == f"vericache_{name}"


CERTIFIED = {"vericache_mode": "certified"}
NO_OUTPUT: dict[Bound, str] = {"output": "denominators only"}


def test_certified_decode_samples_as_many_tokens_in_every_head() -> None:
    settings = RequestSettings(OPEN, {**CERTIFIED, "vericache_epsilon": 0.2, "vericache_delta": 0.3})
    assert settings.certified is not None
    assert (settings.certified.target.eps, settings.certified.target.delta) == (0.2, 0.3)
    assert settings.certified.z == OPEN.sketch_radius
    assert (settings.config.selector, settings.config.method.counts) == ("poisson", "uniform")
    assert RequestSettings(OPEN, {**CERTIFIED, "vericache_counts": "per_head"}).config.method.counts == "per_head"
    by_default = RequestSettings(OPEN, CERTIFIED).certified
    assert by_default is not None
    assert by_default.target.eps == OPEN.epsilon
    assert RequestSettings(OPEN, {"vericache_mode": "draft"}).certified is None


def test_what_is_certified_is_the_servers_choice_and_then_the_clients() -> None:
    server = OPEN.model_copy(update={"bound": "output"})
    asked = {
        "denominator": RequestSettings(OPEN, CERTIFIED),
        "output": RequestSettings(OPEN, {**CERTIFIED, "vericache_bound": "output"}),
    }
    for bound, settings in asked.items():
        assert settings.certified is not None
        assert settings.certified.target.bound == bound
    by_default = RequestSettings(server, CERTIFIED).certified
    assert by_default is not None
    assert by_default.target.bound == "output"


@pytest.mark.parametrize(
    ("server", "asked", "refused", "message"),
    [
        ({"request_options": ("mode",)}, {}, {}, "not allowed by this server"),
        ({}, {}, {"denominator": "no kernels"}, "not served here: no kernels"),
        ({}, {"vericache_bound": "output"}, NO_OUTPUT, "not served here: denominators only"),
        ({"bound": "output"}, {}, NO_OUTPUT, "not served here: denominators only"),
        ({"mode": "off"}, {}, {}, "whose mode is draft"),
        ({"page_format": "turboquant4"}, {}, {}, "page_format is turboquant4"),
        ({}, {"vericache_selector": "top"}, {}, "expected poisson"),
        ({}, {"vericache_compressor": "streaming_llm"}, {}, "cannot select by 'poisson'"),
    ],
)
def test_where_certified_decode_cannot_be_served_it_is_refused(
    server: dict[str, Any], asked: dict[str, Any], refused: dict[Bound, str], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        RequestSettings(OPEN.model_copy(update=server), {**CERTIFIED, **asked}, certified_refused=refused)


def test_a_bound_that_is_refused_leaves_the_other() -> None:
    server = OPEN.model_copy(update={"bound": "output"})
    for settings in (
        RequestSettings(OPEN, CERTIFIED, certified_refused=NO_OUTPUT),
        RequestSettings(server, {**CERTIFIED, "vericache_bound": "denominator"}, certified_refused=NO_OUTPUT),
    ):
        assert settings.certified is not None
        assert settings.certified.target.bound == "denominator"
    assert RequestSettings(server, {"vericache_mode": "draft"}, certified_refused=NO_OUTPUT).certified is None
