"""Read `llm/models.toml`: the language models, engines and loads that `kda llm` knows."""

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from kda_judge.contract.config import Pin
from kda_judge.contract.errors import UsageError
from kda_judge.contract.near_names import nearest
from kda_judge.contract.strict_models import Strict, read_toml, validate
from kda_tools import checkout_folder

FOLDER = Path("llm")
"""Folder in the checkout with `models.toml`, the list of upstream files, and `docs/`: the records and their pages."""
Size = Annotated[int, Field(gt=0, le=1 << 24)]
Target = Literal["h200", "b200"]
EngineName = Literal["transformers", "sglang", "vllm"]


class Load(Strict):
    """How a server is loaded."""

    concurrency: Size
    """Requests in flight."""
    requests: Size
    """Requests in all."""


class Tokens(Strict):
    """Numbers of tokens of one request with random data."""

    input: Size
    output: Size
    source: str


class Engine(Strict):
    """How an engine is started. Words in braces are filled in: model, host, port, gpus, traces."""

    release: str
    program: str
    """Name of the program that must be on PATH."""
    command: tuple[str, ...] = Field(min_length=1)
    on_cpu: tuple[str, ...] | None = None
    """Words to add to the command without a GPU; None: this engine needs one."""
    one_gpu: bool = False
    """Whether it serves on no more than one GPU."""
    install: str
    source: str
    running: str | None = None
    """The metric at /metrics that counts requests being worked on; None: there is none, and no profiler either."""
    waiting: str | None = None
    """Name of the metric that counts waiting requests; None as for `running`."""


class Config(Strict):
    """Widths of one model. What no source gives is absent."""

    attention: Literal["grouped", "latent"]
    """`grouped`: grouped-query attention; `latent`: multi-head latent attention (MLA)."""
    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size | None = None
    """Intermediate size of dense layers."""
    layers: Size
    dense_layers: Annotated[int, Field(ge=0)] = 0
    """Number of first layers without experts, in a model with experts."""
    heads: Size
    kv_heads: Size | None = None
    head_dim: Size | None = None
    qk_norm: bool | None = None
    kv_lora_rank: Size | None = None
    qk_rope_head_dim: Size | None = None
    rms_norm_eps: float | None = None
    rope_theta: float | None = None
    experts: Size | None = None
    experts_per_token: Size | None = None
    shared_experts: Annotated[int, Field(ge=0)] = 0
    moe_intermediate_size: Size | None = None

    @model_validator(mode="after")
    def _whole(self) -> "Config":
        moe = (self.experts, self.experts_per_token, self.moe_intermediate_size)
        if any(moe) and not all(moe):
            raise ValueError("experts, experts_per_token, moe_intermediate_size: expected all of them or none")
        if self.experts is None and self.intermediate_size is None:
            raise ValueError("intermediate_size: expected one, as there are no experts")
        if self.attention == "grouped" and (self.kv_heads is None or self.head_dim is None):
            raise ValueError("kv_heads, head_dim: expected both for grouped attention")
        return self


class Llm(Strict):
    """One model."""

    title: str
    hub: str | None = None
    """Name on the Hugging Face Hub; None: it is made on this machine."""
    captured: bool = False
    """Whether `kda llm capture` can build its step."""
    gpus: dict[Target, Size] = {}
    """Target -> degree of tensor parallelism."""
    gpus_source: str | None = None
    serve: dict[EngineName, tuple[str, ...]] = {}
    """Engine -> more words of its command."""
    source: str
    config: Config

    @model_validator(mode="after")
    def _sourced(self) -> "Llm":
        if bool(self.gpus) != (self.gpus_source is not None):
            raise ValueError("gpus, gpus_source: expected both or neither")
        config = self.config
        if self.captured and (
            config.attention != "grouped"
            or None in (config.rms_norm_eps, config.rope_theta, config.qk_norm)
            or config.dense_layers
            or config.shared_experts
        ):
            raise ValueError(
                "captured: expected grouped attention, rms_norm_eps, rope_theta, qk_norm, layers of one kind, and no "
                "shared experts"
            )
        return self


class KernelFiles(Strict):
    """The wheel whose kernels a capture runs, and which of its files are listed in its lock file."""

    pin: Pin
    take: tuple[str, ...] = Field(min_length=1)
    """fnmatch patterns of paths inside the wheel."""
    without: tuple[str, ...] = ()


class KnownLlms(Strict):
    """The whole file."""

    kernels: KernelFiles

    loads: dict[Literal["low", "mid", "high"], Load] = Field(min_length=1)
    tokens: Tokens
    engines: dict[EngineName, Engine] = Field(min_length=1)
    models: dict[str, Llm] = Field(min_length=1)

    def model(self, name: str) -> Llm:
        """The model of this name, or a UsageError that names the nearest ones."""
        if name not in self.models:
            near = ", ".join(nearest(name, self.models))
            raise UsageError(f"unknown model {name!r}; nearest: {near}; `kda llm list` shows all")
        return self.models[name]

    def engine(self, name: EngineName) -> Engine:
        """How this engine is started, or a UsageError that says which can be."""
        if name not in self.engines:
            raise UsageError(f"--engine {name}: expected one that llm/models.toml has, {' or '.join(self.engines)}")
        return self.engines[name]


find_folder = partial(checkout_folder.find, FOLDER)
folder = partial(checkout_folder.demand, FOLDER)


def load_llms(path: Path | None = None) -> KnownLlms:
    """The known models at `path`, by default the checkout's; a UsageError names file and key."""
    path = path or folder() / checkout_folder.FILE
    return validate(KnownLlms, read_toml(path), path)
