"""The one typed configuration. Precedence: flags (or keyword arguments) > environment > YAML file > default."""

import os
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from compressors import MethodError, MethodSpec, find, validate
from compressors.budget import kept_count
from vericache.certified.certificate import Bound
from vericache.errors import ConfigError

ENV_PREFIX = "VERICACHE_"
ENV_FILE = "VERICACHE_CONFIG"  # path of the YAML file
KEY = "vericache"  # where the configuration lives in vLLM's additional_config


# On or off, which YAML 1.1 reads as booleans.
SWITCHES = ("bitwise", "shared_verifies", "residual_reload", "reuse_scores")

Width = Literal[2, 3, 4, 16]  # bits of a number, ``compressors.bits.WIDTHS``


class VeriCacheConfig(BaseModel):
    """Every setting of VeriCache. Sizes are in the unit the name ends with."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: Literal["auto", "draft", "off"] = Field(
        "auto",
        description="auto: plain vLLM rows while the KV pool has room, long requests draft when it runs short and that "
        "pays; draft: all long requests draft; off: plain vLLM rows with VeriCache's sampler",
    )
    bitwise: Literal["off", "on"] = Field(
        "off",
        description="on: batch-invariant kernels on a GPU: tokens and logits equal plain vLLM's bit by bit; slow, for "
        "proof and audits",
    )
    min_prompt_tokens: int = Field(1024, ge=1, description="shorter prompts stay plain vLLM rows in the same batch")
    draft_length: int = Field(25, ge=1, description="drafts a round aims at (x), the first one where it adapts")
    draft_policy: Literal["fixed", "ema", "bandit"] = Field(
        "ema",
        description="how a request's draft length follows what its rounds accept: not, by an estimate of the chance of "
        "a right draft, or by trial (bandit)",
    )
    window: int = Field(64, ge=4, le=1024, description="iterations planned ahead (W); no round drafts longer")
    policy: Literal["staggered", "lockstep"] = Field("staggered", description="when requests verify")
    shared_verifies: Literal["on", "off"] = Field(
        "on",
        description="on: requests whose prompts begin alike keep that part once in the host and verify together on one "
        "reload of it, where vLLM's prefix cache is on",
    )
    residual_reload: Literal["on", "off"] = Field(
        "off",
        description="on: a reload fetches from the host only what the arena does not hold; needs page_format plain",
    )
    reuse_scores: Literal["on", "off"] = Field(
        "on",
        description="on: scores that do not depend on what comes behind (compressor kvzip) are kept for contexts that "
        "begin alike, where vLLM's prefix cache is on",
    )
    verify_tokens: int = Field(300, ge=2, description="cap on verify tokens in one iteration")
    compressor: str = Field("kvzip", description="scoring method, see `vericache methods`")
    counts: Literal["auto", "uniform", "per_layer", "per_head", "within_layer", "pyramid"] = Field(
        "auto",
        description="how kept tokens are spread over layers and KV heads; auto: as the compressor does by itself",
    )
    pyramid_beta: float = Field(20.0, ge=1, description="counts pyramid: average count over the last layer's")
    selector: Literal["top", "poisson", "pareto"] = Field(
        "top",
        description="how a head's tokens are chosen: the best, or at random with probabilities that follow the scores",
    )
    selector_power: float = Field(1.0, gt=0, description="random selectors: exponent of the scores")
    selector_floor: float = Field(
        1e-3, gt=0, le=1, description="random selectors: share of a head's largest score that all are raised to"
    )
    selector_seed: int = Field(0, ge=0, lt=2**32, description="random selectors: seed")
    ratio: float = Field(0.25, gt=0, le=1, description="kept fraction of the context")
    ratio_limit: float | None = Field(
        None,
        gt=0,
        le=1,
        description="a request whose drafts stay wrong is compressed anew at twice the ratio, up to this",
    )
    sinks: int = Field(4, ge=0, description="first tokens that are always kept")
    recent: int = Field(
        32, ge=1, description="last context tokens that are always kept, and verified ones that are never packed"
    )
    compressor_options: dict[str, int] = Field({}, description="options of the method, for example kvzip: chunk")
    surrogate: str | None = Field(
        None,
        description="file of a surrogate (`vericache surrogate train`), which compressors kvzap and fast_kvzip need",
    )
    bound: Bound = Field(
        "denominator",
        description="certified decode: what epsilon bounds the relative error of, a query's softmax denominator or the "
        "attention's output, which fetches more",
    )
    epsilon: float = Field(0.05, gt=0, lt=1, description="certified decode: relative error of what bound names")
    delta: float = Field(0.1, gt=0, lt=1, description="certified decode: probability that a query exceeds epsilon")
    sketch_radius: float = Field(
        1.0, ge=0, description="certified decode: standard deviations by which the sketch of a key may be wrong"
    )
    measured_share: float = Field(
        0.01, ge=0, le=1, description="certified decode: share of layers whose true error is measured, at every token"
    )
    arena_fraction: Literal["auto"] | Annotated[float, Field(ge=0, lt=1)] = Field(
        "auto",
        description="share of the KV memory budget given to the draft arena; auto: what the byte model finds best at "
        "start, none where mode auto would not gain by it; 0: no request drafts",
    )
    expected_context: int | None = Field(
        None, ge=1, description="arena_fraction auto: tokens of a usual request; half of max_model_len if not given"
    )
    hbm_bytes_per_second: float | None = Field(
        None, gt=0, description="arena_fraction auto: fix the device memory's bandwidth instead of measuring it"
    )
    page_tokens: int = Field(32, ge=1, description="tokens in one head page of the arena")
    page_format: Literal[
        "plain", "turboquant4", "turboquant3", "turboquant2", "kivi4", "kivi2", "rotatekv4", "rotatekv2",
        "kvquant4", "kvquant3", "kvquant2", "turboquant_mixed",
    ] = Field(
        "plain",
        description="how the arena stores tokens: the model's dtype, or packed into so many bits (kvquant and "
        "turboquant_mixed: simulated, drafts as with it in the memory of plain)",
    )  # fmt: skip
    layer_bits: tuple[tuple[Width, Width], ...] = Field(
        (), description="page_format turboquant_mixed: [bits of keys, bits of values] of each layer; 4 if not given"
    )
    tail_tokens: int = Field(512, ge=1, description="tokens behind the compressed context before it is compressed anew")
    host_memory_gib: float = Field(4.0, gt=0, description="host memory for the full KV of drafting requests")
    iteration_seconds: float | None = Field(None, gt=0, description="fix T_iter of the BW ring instead of measuring it")
    link_bytes_per_second: float | None = Field(None, gt=0, description="fix L of the BW ring instead of measuring it")
    max_recoveries: int = Field(2, ge=0, description="failed demotions or reloads before a request stays resident")
    request_options: tuple[
        Literal["mode", "draft_length", "compressor", "counts", "selector", "ratio", "bound", "epsilon", "delta"], ...
    ] = Field(
        ("mode", "draft_length"),
        description="what clients may set for a request (vllm_xargs: vericache_mode, ...); certified decode, which is "
        "not exact, is allowed by epsilon",
    )
    audit_share: float = Field(0.0, ge=0, le=1, description="share of drafted requests the server replays on full KV")
    audit_folder: str | None = Field(None, description="where reproducer files of audit mismatches go")
    audit_keep: Literal["hash", "tokens"] = Field("hash", description="what a reproducer holds of prompt and output")
    trace_iterations: int = Field(
        240, ge=0, description="iterations of the schedule to remember for the status page and the demo's picture"
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_booleans(cls, value: Any, info: ValidationInfo) -> Any:
        """YAML 1.1 reads ``off`` and ``yes`` as booleans, and Python takes those for numbers. No setting is one."""
        if info.field_name in ("mode", *SWITCHES) and value is False:
            return "off"
        if info.field_name in SWITCHES and value is True:
            return "on"
        if isinstance(value, bool):
            raise ValueError(f"got the boolean {value}")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> "VeriCacheConfig":
        try:
            method = validate(self.method)
        except MethodError as error:
            raise ValueError(str(error)) from None
        if method.network is not None and self.surrogate is None:
            raise ValueError(
                f"compressor {self.compressor} needs a surrogate that was trained for the model, and none is given; "
                f"train one with `vericache surrogate train` and set surrogate to its file, or use another compressor"
            )
        if self.layer_bits and self.page_format != "turboquant_mixed":
            raise ValueError(
                f"layer_bits is given and page_format is {self.page_format}, which has one width; set page_format to "
                f"turboquant_mixed, or leave layer_bits out"
            )
        if self.residual_reload == "on" and self.page_format != "plain":
            raise ValueError(
                f"residual_reload is on and page_format is {self.page_format}, whose pages do not hold tokens as they "
                f"are; set page_format to plain, or leave residual_reload out"
            )
        if self.arena_fraction == 0 and (self.mode == "draft" or "epsilon" in self.request_options):
            asks = "mode is draft" if self.mode == "draft" else "request_options names epsilon"
            raise ValueError(
                f"arena_fraction is 0, so there is no memory to draft in, and {asks}; leave arena_fraction out or "
                f"give a share, or change that"
            )
        if self.draft_length > self.window - 2:
            raise ValueError(
                f"draft_length is {self.draft_length}, but a window of {self.window} iterations holds at most "
                f"{self.window - 2} drafts and a verify; raise window or lower draft_length"
            )
        if self.verify_tokens < self.window:
            raise ValueError(
                f"verify_tokens is {self.verify_tokens}, expected at least window ({self.window}), the longest verify"
            )
        if self.ratio_limit is not None and self.ratio_limit < self.ratio:
            raise ValueError(f"ratio_limit is {self.ratio_limit}, expected at least ratio ({self.ratio})")
        least = self.method.least
        wanted = kept_count(self.ratio, self.min_prompt_tokens, 0, 0)
        if wanted < min(least, self.min_prompt_tokens):
            sampled = "" if self.selector == "top" else " and one to sample"
            raise ValueError(
                f"ratio {self.ratio} keeps {wanted} tokens of a {self.min_prompt_tokens}-token prompt, fewer than "
                f"sinks + recent{sampled} ({least}); raise ratio or min_prompt_tokens, or lower sinks or recent"
            )
        return self

    @classmethod
    def of(cls, additional_config: Mapping[str, Any] | None) -> "VeriCacheConfig":
        """The settings that travel in vLLM's ``additional_config``; the defaults when there are none."""
        return cls(**(additional_config or {}).get(KEY, {}))

    @property
    def needs_arena(self) -> str | None:
        """What asks for an arena even where drafting is slower than plain vLLM, in words. A client's mode draft alone
        does not: every server allows it by default, and it is served by a plain row where there is no arena."""
        if self.mode == "draft":
            return "mode is draft"
        usual = type(self).model_fields["request_options"].default
        if self.mode != "off" and (more := [name for name in self.request_options if name not in usual]):
            return f"request_options names {', '.join(more)}"
        return None

    @property
    def method(self) -> MethodSpec:
        """Raises MethodError for an unknown compressor."""
        counts = find(self.compressor).default_counts if self.counts == "auto" else self.counts
        options = tuple(sorted(self.compressor_options.items()))
        return MethodSpec(
            self.compressor, counts, self.ratio, self.sinks, self.recent, options, self.pyramid_beta,
            self.selector, self.selector_power, self.selector_floor, self.selector_seed,
        )  # fmt: skip


def load(
    flags: Mapping[str, Any] | None = None, env: Mapping[str, str] | None = None, file: str | Path | None = None
) -> VeriCacheConfig:
    """Merge the sources and validate. ``flags`` holds only what was given; ``file`` defaults to $VERICACHE_CONFIG.

    Raises:
        ConfigError: an unknown key (with the nearest name), a wrong value, or an unreadable file.
    """
    env = os.environ if env is None else env
    merged: dict[str, Any] = {}
    path = file or env.get(ENV_FILE)
    if path:
        values = _read_yaml(Path(path))
        check_names(values, f"file {path}")
        merged |= values
    variables = {
        k.removeprefix(ENV_PREFIX).lower(): _value(k, v)
        for k, v in env.items()
        if k.startswith(ENV_PREFIX) and k != ENV_FILE
    }
    check_names(variables, "the environment", lambda name: ENV_PREFIX + name.upper())
    check_names(flags or {}, "the arguments")
    merged |= {**variables, **(flags or {})}
    try:
        return VeriCacheConfig(**merged)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, e['loc'])) or 'settings'}: {e['msg'].removeprefix('Value error, ')}"
            for e in error.errors()
        )
        raise ConfigError(f"invalid VeriCache configuration: {problems}") from None


def _value(variable: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"cannot read the value of {variable}, {text!r}: {error}") from None


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read the VeriCache configuration file {path}: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds a {type(data).__name__}, expected a mapping of setting names to values")
    return data


def check_names(names: Iterable[str], source: str, spelled: Callable[[str], str] = str) -> None:
    """Raises ConfigError for the first name that is no setting, with the nearest one, as ``spelled`` in the source."""
    for name in names:
        if name not in VeriCacheConfig.model_fields:
            near = get_close_matches(str(name), VeriCacheConfig.model_fields, n=1)
            hint = f"did you mean {spelled(near[0])!r}?" if near else "see `vericache settings` for all of them"
            raise ConfigError(f"unknown VeriCache setting {spelled(str(name))!r} in {source}; {hint}")
