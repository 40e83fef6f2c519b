"""Precedence of the sources, and errors that name the setting and what would be right."""

import dataclasses
import json
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from compressors import METHODS
from compressors.budget import COUNTS
from compressors.select import SELECTORS
from vericache.config import ENV_FILE, ENV_PREFIX, VeriCacheConfig, load
from vericache.errors import ConfigError, VeriCacheError

DEFAULT = VeriCacheConfig()


def write(folder: Path, text: str) -> Path:
    path = folder / "settings.yaml"
    path.write_text(text)
    return path


# -- precedence -----------------------------------------------------------------------------------------


def test_without_any_source_the_defaults_hold() -> None:
    assert load(env={}) == DEFAULT


def test_flags_win_over_env_over_file_over_default(tmp_path: Path) -> None:
    path = write(tmp_path, "draft_length: 11\nwindow: 41\nsinks: 1\n")
    env = {"VERICACHE_DRAFT_LENGTH": "12", "VERICACHE_WINDOW": "42"}
    config = load({"draft_length": 13}, env, path)
    assert (config.draft_length, config.window, config.sinks, config.recent) == (13, 42, 1, DEFAULT.recent)


@pytest.mark.parametrize("name", sorted(VeriCacheConfig.model_fields))
def test_every_setting_can_come_from_every_source(name: str, tmp_path: Path) -> None:
    """One legal value per setting that is not its default."""
    values: dict[str, Any] = {
        "mode": "off",
        "bitwise": "on",
        "shared_verifies": "off",
        "reuse_scores": "off",
        "residual_reload": "on",
        "policy": "lockstep",
        "draft_policy": "bandit",
        "page_format": "kivi2",
        "selector": "poisson",
        "selector_floor": 0.5,
        "counts": "uniform",
        "compressor": "snapkv",
        "compressor_options": {"chunk": 512},
        "iteration_seconds": 0.25,
        "link_bytes_per_second": 2.5e10,
        "arena_fraction": 0.25,
        "expected_context": 8000,
        "hbm_bytes_per_second": 4.2e12,
        "host_memory_gib": 1.5,
        "ratio": 0.75,
        "ratio_limit": 0.5,
        "request_options": ("ratio",),
        "audit_share": 0.5,
        "audit_folder": "reproducers",
        "audit_keep": "tokens",
        "surrogate": "surrogate.safetensors",
        "layer_bits": ((4, 2), (16, 3)),
        "bound": "output",
        "epsilon": 0.25,
        "delta": 0.5,
        "measured_share": 0.5,
    }
    value = values[name] if name in values else getattr(DEFAULT, name) + 1
    text = json.dumps(value)
    beside = {"page_format": "turboquant_mixed"} if name == "layer_bits" else {}
    from_flag = load({name: value, **beside}, {})
    from_env = load(beside, env={ENV_PREFIX + name.upper(): text})
    from_file = load(beside, env={}, file=write(tmp_path, f"{name}: {text}\n"))
    assert getattr(from_flag, name) == value != getattr(DEFAULT, name)
    assert from_env == from_file == from_flag


def test_a_compressor_that_needs_a_surrogate_is_refused_without_one() -> None:
    with pytest.raises(ConfigError, match=r"kvzap needs a surrogate .* train one with `vericache surrogate train`"):
        load({"compressor": "kvzap"}, {})
    assert load({"compressor": "kvzap", "surrogate": "here"}, {}).surrogate == "here"


@pytest.mark.parametrize("bits", [[[4, 5]], [[4, 4, 4]], [4, 4], [[0, 4]], [["4", 4]]])
def test_widths_that_do_not_exist_are_refused(bits: Any) -> None:
    with pytest.raises(ConfigError, match="layer_bits"):
        load({"layer_bits": bits, "page_format": "turboquant_mixed"}, {})


def test_widths_of_layers_are_refused_where_there_is_one_width() -> None:
    with pytest.raises(ConfigError, match="layer_bits is given and page_format is turboquant4, which has one width"):
        load({"layer_bits": [[4, 2]], "page_format": "turboquant4"}, {})


@pytest.mark.parametrize("pages", ["turboquant4", "kivi2", "kvquant4", "turboquant_mixed"])
def test_pages_that_do_not_hold_tokens_as_they_are_cannot_stand_in_for_the_hosts(pages: str) -> None:
    with pytest.raises(ConfigError, match=f"residual_reload is on and page_format is {pages}, whose pages do not hold"):
        load({"residual_reload": "on", "page_format": pages}, {})
    assert load({"residual_reload": True}, {}).residual_reload == "on"


@pytest.mark.parametrize("beside", [{"mode": "draft"}, {"request_options": ["mode", "epsilon"]}])
def test_without_an_arena_nothing_can_draft(beside: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="arena_fraction is 0, so there is no memory to draft in, and"):
        load({"arena_fraction": 0, **beside}, {})


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_without_an_arena_every_request_is_a_plain_row(mode: str) -> None:
    assert load({"arena_fraction": 0, "mode": mode}, {}).arena_fraction == 0


def test_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    path = write(tmp_path, "sinks: 2\n")
    assert load(env={ENV_FILE: str(path)}).sinks == 2


def test_a_file_named_by_the_caller_wins_over_one_named_by_the_environment(tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text("sinks: 7\n")
    assert load(env={ENV_FILE: str(other)}, file=write(tmp_path, "sinks: 2\n")).sinks == 2


def test_the_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERICACHE_SINKS", "3")
    assert load().sinks == 3


def test_other_variables_do_not_matter() -> None:
    assert load(env={"PATH": "x", "VLLM_SINKS": "9", "vericache_sinks": "9"}) == DEFAULT


def test_an_empty_file_is_no_settings(tmp_path: Path) -> None:
    assert load(env={}, file=write(tmp_path, "# nothing yet\n")) == DEFAULT


def test_options_of_a_method_are_given_as_a_mapping(tmp_path: Path) -> None:
    env = load(env={"VERICACHE_COMPRESSOR_OPTIONS": "{chunk: 512}"})
    file = load(env={}, file=write(tmp_path, "compressor_options:\n  chunk: 512\n"))
    assert env == file
    assert env.method.options == (("chunk", 512),)


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        DEFAULT.sinks = 5  # type: ignore[misc]


def test_the_method_carries_the_settings_of_the_compressor() -> None:
    sampled = {"selector": "pareto", "selector_power": 0.5, "selector_floor": 0.01, "selector_seed": 7}
    given = {"compressor": "snapkv", "ratio": 0.5, "sinks": 1, "recent": 40, "compressor_options": {"window": 8}}
    config = load({**given, **sampled}, {})
    assert dataclasses.asdict(config.method) == {
        "name": "snapkv",
        "counts": "uniform",
        "ratio": 0.5,
        "sinks": 1,
        "recent": 40,
        "options": (("window", 8),),
        "beta": 20.0,
        "selector": "pareto",
        "power": 0.5,
        "floor": 0.01,
        "seed": 7,
    }


# -- unknown names ----------------------------------------------------------------------------------------


def test_an_unknown_flag_names_the_nearest_setting() -> None:
    with pytest.raises(ConfigError, match=r"'draft_lenght' in the arguments; did you mean 'draft_length'\?"):
        load({"draft_lenght": 3}, {})


def test_an_unknown_variable_names_the_nearest_one_as_it_is_spelled_there() -> None:
    with pytest.raises(ConfigError, match=r"'VERICACHE_RATO' in the environment; did you mean 'VERICACHE_RATIO'\?"):
        load(env={"VERICACHE_RATO": "0.5"})


def test_an_unknown_key_of_the_file_names_the_file_and_the_nearest_setting(tmp_path: Path) -> None:
    path = write(tmp_path, "windw: 32\n")
    with pytest.raises(ConfigError, match=r"'windw' in file .*settings\.yaml; did you mean 'window'\?"):
        load(env={}, file=path)


def test_a_key_of_the_file_that_is_no_text_is_unknown(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown VeriCache setting '7'"):
        load(env={}, file=write(tmp_path, "7: 8\n"))


def test_a_name_that_resembles_nothing_points_to_the_list() -> None:
    with pytest.raises(ConfigError, match="'qqqq' in the arguments; see `vericache settings`"):
        load({"qqqq": 1}, {})


def test_an_unknown_name_in_a_weaker_source_is_not_hidden_by_a_stronger_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'sink'"):
        load({"sinks": 2}, {"VERICACHE_SINKS": "3"}, write(tmp_path, "sink: 4\n"))


# -- wrong values -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mode", "fast"),
        ("min_prompt_tokens", 0),
        ("draft_length", "many"),
        ("draft_length", 0),
        ("draft_length", None),
        ("draft_length", 2.5),
        ("window", 3),
        ("window", 1025),
        ("policy", "random"),
        ("verify_tokens", 1),
        ("counts", "per_token"),
        ("pyramid_beta", 0.5),
        ("selector", "best"),
        ("selector_power", 0),
        ("selector_floor", 0),
        ("selector_floor", 1.5),
        ("selector_seed", -1),
        ("ratio", 0),
        ("ratio", 1.5),
        ("ratio", [1]),
        ("sinks", -1),
        ("recent", 0),
        ("compressor", 5),
        ("compressor_options", 3),
        ("compressor_options", {"chunk": "long"}),
        ("arena_fraction", 1),
        ("arena_fraction", -0.1),
        ("arena_fraction", "much"),
        ("expected_context", 0),
        ("hbm_bytes_per_second", 0),
        ("page_tokens", 0),
        ("tail_tokens", -1),
        ("host_memory_gib", 0),
        ("iteration_seconds", 0),
        ("link_bytes_per_second", -1),
        ("max_recoveries", -1),
        ("trace_iterations", -1),
    ],
)
def test_a_wrong_value_names_its_setting(name: str, value: object, tmp_path: Path) -> None:
    text = "null" if value is None else str(value)
    sources: list[dict[str, Any]] = [
        {"flags": {name: value}, "env": {}},
        {"env": {ENV_PREFIX + name.upper(): text}},
        {"env": {}, "file": write(tmp_path, f"{name}: {text}\n")},
    ]
    for source in sources:
        with pytest.raises(ConfigError, match=rf"(configuration: |; ){name}\b") as caught:
            load(**source)
        assert isinstance(caught.value, VeriCacheError)
        assert isinstance(caught.value, ValueError)


def test_all_wrong_values_are_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"sinks: .*; recent: "):
        load({"sinks": -1, "recent": 0}, {})


@pytest.mark.parametrize(
    "text", ["sinks: [", "- sinks\n- recent\n", "just text"], ids=["not YAML", "a list", "a sentence"]
)
def test_a_file_that_holds_no_mapping_is_an_error_that_names_it(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"settings\.yaml"):
        load(env={}, file=write(tmp_path, text))


def test_a_file_that_is_no_text_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_bytes(b"sinks: 4 # \xff\n")
    with pytest.raises(ConfigError, match=r"settings\.yaml"):
        load(env={}, file=path)


def test_a_missing_file_and_a_folder_are_errors_that_name_the_path(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.yaml", tmp_path):
        with pytest.raises(ConfigError, match=f"cannot read .*{path.name}"):
            load(env={}, file=path)


def test_a_variable_that_cannot_be_parsed_is_an_error_that_names_it() -> None:
    with pytest.raises(ConfigError, match=r"(?i)compressor_options"):
        load(env={"VERICACHE_COMPRESSOR_OPTIONS": "{chunk: "})


# -- settings that must fit each other ------------------------------------------------------------------------


def test_a_draft_and_its_verify_must_fit_the_window() -> None:
    assert load({"draft_length": 30, "window": 32}, {}).draft_length == 30
    with pytest.raises(ConfigError, match="draft_length is 31, but a window of 32 iterations holds at most 30 drafts"):
        load({"draft_length": 31, "window": 32}, {})


def test_the_longest_verify_must_fit_the_cap() -> None:
    assert load({"verify_tokens": 64, "window": 64}, {}).verify_tokens == 64
    with pytest.raises(ConfigError, match=r"verify_tokens is 63, expected at least window \(64\)"):
        load({"verify_tokens": 63, "window": 64}, {})


def test_the_ratio_must_keep_the_tokens_that_are_always_kept() -> None:
    settings = {"min_prompt_tokens": 400, "ratio": 0.1, "sinks": 8, "recent": 32}
    assert load(settings, {}).ratio == 0.1
    with pytest.raises(ConfigError, match=r"keeps 40 tokens of a 400-token prompt, fewer than sinks \+ recent \(41\)"):
        load({**settings, "sinks": 9}, {})


def test_a_short_prompt_may_be_kept_whole() -> None:
    assert load({"min_prompt_tokens": 8, "ratio": 1.0}, {}).min_prompt_tokens == 8


def test_an_unknown_compressor_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown compressor 'kvzipp'; did you mean 'kvzip'\?"):
        load({"compressor": "kvzipp"}, {})


@pytest.mark.parametrize("counts", ["per_head", "per_layer"])
def test_streaming_llm_scores_every_head_alike(counts: str) -> None:
    with pytest.raises(ConfigError, match=f"'streaming_llm' cannot allocate counts '{counts}'.*uniform"):
        load({"compressor": "streaming_llm", "counts": counts}, {})
    assert load({"compressor": "streaming_llm", "counts": "uniform"}, {}).method.counts == "uniform"


@pytest.mark.parametrize("name", METHODS)
def test_without_counts_a_compressor_spreads_tokens_as_it_does_by_itself(name: str) -> None:
    needed = {"surrogate": "file"} if METHODS[name].network else {}
    assert load({"compressor": name, **needed}, {}).method.counts == METHODS[name].default_counts


def test_all_selectors_can_be_set() -> None:
    assert get_args(VeriCacheConfig.model_fields["selector"].annotation) == SELECTORS
    with pytest.raises(ConfigError, match="'streaming_llm' cannot select by 'poisson': its scores allow top"):
        load({"compressor": "streaming_llm", "selector": "poisson"}, {})


def test_a_sample_needs_a_token_that_is_not_forced() -> None:
    settings = {"min_prompt_tokens": 400, "ratio": 0.1, "sinks": 8, "recent": 32}
    with pytest.raises(ConfigError, match=r"fewer than sinks \+ recent and one to sample \(41\)"):
        load({**settings, "selector": "pareto"}, {})


def test_all_count_modes_can_be_set() -> None:
    assert get_args(VeriCacheConfig.model_fields["counts"].annotation) == ("auto", *COUNTS)
    assert load({"counts": "pyramid", "pyramid_beta": 2}, {}).method.beta == 2


def test_an_option_of_another_method_is_unknown() -> None:
    with pytest.raises(ConfigError, match=r"unknown kvzip option 'chunck'; did you mean 'chunk'\?"):
        load({"compressor_options": {"chunck": 512}}, {})
    with pytest.raises(ConfigError, match="unknown streaming_llm option 'chunk'"):
        load({"compressor": "streaming_llm", "counts": "uniform", "compressor_options": {"chunk": 512}}, {})


@pytest.mark.parametrize(
    ("compressor", "options"), [("kvzip", {"chunk": 1}), ("snapkv", {"kernel": 4}), ("snapkv", {"window": 33})]
)
def test_an_option_value_that_the_method_cannot_use_is_named(compressor: str, options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=f"{compressor}: option '{next(iter(options))}'"):
        load({"compressor": compressor, "compressor_options": options}, {})
