"""Build each model's class with random weights, and the inputs of one step.

`INPUTS` has one function for each key `build`. It takes the module, its configuration and a `Request`, and returns the
arguments of its forward. They have the shapes that SGLang's pipelines give the class; their values are normal noise
from the request's seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kda_tools.models.boot import load
from kda_tools.models.known_models import Model, Sizes

Inputs = dict[str, Any]
TIMESTEP = 500.0
"""The timestep of the inputs: the middle of a scale of a thousand."""


@dataclass(frozen=True)
class Request:
    """What a builder needs to know beside its class."""

    sizes: Sizes
    release: str
    seed: int
    device: torch.device
    dtype: torch.dtype

    def noise(self, *shape: int) -> torch.Tensor:
        """Normal noise; the same for the same seed and shape."""
        generator = torch.Generator(device=self.device).manual_seed(self.seed)
        return torch.randn(shape, generator=generator, device=self.device, dtype=torch.float32).to(self.dtype)

    @property
    def timestep(self) -> torch.Tensor:
        """One timestep, float32 [1]."""
        return torch.tensor([TIMESTEP], device=self.device)

    def latent(self, spatial: int, temporal: int) -> tuple[int, int, int]:
        """Frames, height and width of a latent with these compressions."""
        return (self.sizes.frames - 1) // temporal + 1, self.sizes.height // spatial, self.sizes.width // spatial


@dataclass(frozen=True)
class Built:
    """A model that is ready for a step."""

    module: torch.nn.Module
    inputs: Inputs
    moving: int
    """How many leading entries of `hidden_states`' second dimension a denoising step moves; 0: this is no denoiser."""


def build(model: Model, layers: dict[str, int], request: Request, values: bool = True) -> Built:
    """The class with `layers` blocks of each kind and random weights, in eval mode, and its inputs.

    Without `values` the weights are not filled, as fake tensors hold no values.
    """
    config = _configured(model, layers, request)
    default = torch.get_default_dtype()
    torch.set_default_dtype(request.dtype)
    try:
        with torch.device(request.device):
            module = _build_module(model, config)
            inputs = INPUTS[model.build](module, config, request)
    finally:
        torch.set_default_dtype(default)
    if values:
        randomise(module, request.seed)
        module = module.to(request.device)
    module = module.eval().requires_grad_(False)
    if hasattr(module, "post_load_weights"):
        module.post_load_weights()  # type: ignore[operator]
    size = int(inputs["hidden_states"].shape[1])
    return Built(module, inputs, MOVING[model.build](size) if model.build in MOVING else size)


def weight_bytes(model: Model, layers: dict[str, int], request: Request) -> int:
    """What the weights of `build` take, found without allocating them."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(request.dtype)
    try:
        with torch.device("meta"):
            module = _build_module(model, _configured(model, layers, request))
    finally:
        torch.set_default_dtype(default)
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


def _configured(model: Model, layers: dict[str, int], request: Request) -> Any:
    config = load(model.config)()
    if model.blocks or model.arch:
        config.update_model_arch({**model.arch, **layers})
    arch = config.arch_config
    if model.build == "hunyuanvideo":
        arch.dtype = request.dtype
    elif model.build == "hunyuan_vae":
        config.load_encoder = False
    elif model.build == "mova_audio":
        arch.patch_size = (1,)  # as published; the default is that of pictures
    elif model.build == "ltx2":
        config.update_model_arch({"rope_type": "split"})
        arch.cross_attention_dim, arch.audio_cross_attention_dim = arch.hidden_size, arch.audio_hidden_size
    return config


def _build_module(model: Model, config: Any) -> torch.nn.Module:
    cls = load(model.class_)
    if model.build == "hunyuan_vae":
        return _Decoder(cls(config))
    made: torch.nn.Module = cls(config=config, hf_config={"rope_type": "split"} if model.build == "ltx2" else {})
    return made


@torch.no_grad()
def randomise(module: torch.nn.Module, seed: int) -> None:
    """Seeded weights: matrices N(0, 1 / fan in), norm weights near one, biases and tables small; buffers stay."""
    for number, (name, parameter) in enumerate(module.named_parameters()):
        generator = torch.Generator(device=parameter.device).manual_seed(seed * 1_000_003 + number)
        noise = torch.randn(parameter.shape, generator=generator, device=parameter.device, dtype=torch.float32)
        if "table" in name:
            noise /= math.sqrt(parameter.shape[-1])
        elif parameter.ndim >= 2:
            noise /= math.sqrt(parameter[0].numel())
        elif "norm" in name and name.endswith("weight"):
            noise = 1 + 0.1 * noise
        else:
            noise *= 0.02
        parameter.copy_(noise)


def _qwen_image(module: Any, config: Any, request: Request, *, pictures: int = 1) -> Inputs:
    _, height, width = request.latent(16, 1)
    shapes, text = [[(1, height, width)] * pictures], request.sizes.text
    pipeline = load("sglang.multimodal_gen.configs.pipeline_configs.qwen_image.QwenImagePipelineConfig")
    tables = pipeline.get_freqs_cis(shapes, [text], module.rotary_emb, request.device, request.dtype)
    frequencies = (
        dict(zip(("freqs_cis", "freqs_complex"), tables, strict=True))
        if isinstance(tables[0], tuple)
        else {"freqs_cis": tables}
    )
    return {
        "hidden_states": request.noise(1, pictures * height * width, 64),
        "encoder_hidden_states": request.noise(1, text, 3584),
        "timestep": request.timestep,
        "img_shapes": shapes,
        "txt_seq_lens": [text],
        **frequencies,
    }


def _qwen_edit(module: Any, config: Any, request: Request) -> Inputs:
    return _qwen_image(module, config, request, pictures=2)


def _wan(module: Any, config: Any, request: Request, *, spatial: int = 8) -> Inputs:
    frames, height, width = request.latent(spatial, 4)
    timestep = request.timestep
    if spatial == 16:  # the 5B model has a timestep for every token
        timestep = timestep.expand(1, frames * (height // 2) * (width // 2)).contiguous()
    return {
        "hidden_states": request.noise(1, config.arch_config.in_channels, frames, height, width),
        "encoder_hidden_states": request.noise(1, request.sizes.text, 4096),
        "timestep": timestep,
    }


def _wan_ti2v(module: Any, config: Any, request: Request) -> Inputs:
    return _wan(module, config, request, spatial=16)


def _wan_i2v(module: Any, config: Any, request: Request) -> Inputs:
    inputs = _wan(module, config, request)
    return {**inputs, "encoder_hidden_states_image": [request.noise(1, 257, 1280)]}


def _hunyuanvideo(module: Any, config: Any, request: Request) -> Inputs:
    return {
        "hidden_states": request.noise(1, 16, *request.latent(8, 4)),
        "encoder_hidden_states": [request.noise(1, request.sizes.text, 4096), request.noise(1, 768)],
        "timestep": request.timestep,
        "guidance": torch.tensor([6016.0], device=request.device, dtype=request.dtype),
    }


def _zimage(module: Any, config: Any, request: Request) -> Inputs:
    _, height, width = request.latent(16, 1)
    text = request.sizes.text
    padded = -(-text // 32) * 32
    grid, rope = module.create_coordinate_grid, module.rotary_emb
    captions = rope(grid((padded, 1, 1), (1, 0, 0), request.device).flatten(0, 2))
    places = grid((1, height, width), (padded + 1, 0, 0), request.device).flatten(0, 2)
    places = torch.cat([places, places.new_zeros((-len(places) % 32, 3))])
    newer = (
        {} if request.release == "0.5.12.post1" else {"caption_valid_lens": torch.tensor([text], device=request.device)}
    )
    return {
        "hidden_states": request.noise(1, 16, 1, 2 * height, 2 * width),
        "encoder_hidden_states": request.noise(1, text, 2560),
        "timestep": request.timestep,
        "freqs_cis": (captions, rope(places)),
        **newer,
    }


def _flux(module: Any, config: Any, request: Request) -> Inputs:
    _, height, width = request.latent(16, 1)
    places = torch.zeros(height, width, 3, device=request.device)
    places[..., 1] += torch.arange(height, device=request.device)[:, None]
    places[..., 2] += torch.arange(width, device=request.device)[None]
    text = module.rotary_emb(torch.zeros(request.sizes.text, 3, device=request.device))
    picture = module.rotary_emb(places.reshape(-1, 3))
    return {
        "hidden_states": request.noise(1, height * width, 64),
        "encoder_hidden_states": request.noise(1, request.sizes.text, 4096),
        "pooled_projections": request.noise(1, 768),
        "timestep": request.timestep,
        "guidance": torch.tensor([3500.0], device=request.device),
        "freqs_cis": tuple(torch.cat(pair) for pair in zip(text, picture, strict=True)),
    }


def _ltx2(module: Any, config: Any, request: Request) -> Inputs:
    frames, height, width = request.latent(32, 8)
    audio, text = request.sizes.audio or 1, request.sizes.text
    batch = request.sizes.batch
    timestep = torch.full((batch, 1), TIMESTEP / 1000, device=request.device)
    return {
        "hidden_states": request.noise(batch, frames * height * width, 128),
        "audio_hidden_states": request.noise(batch, audio, 128),
        "encoder_hidden_states": request.noise(batch, text, 3840),
        "audio_encoder_hidden_states": request.noise(batch, text, 3840),
        "timestep": timestep,
        "audio_timestep": timestep,
        "num_frames": frames,
        "height": height,
        "width": width,
        "audio_num_frames": audio,
    }


def _joyimage_edit(module: Any, config: Any, request: Request) -> Inputs:
    _, height, width = request.latent(16, 1)
    pictures = ((1, height, width),) * 2
    tokens = 2 * height * width
    tables = module._compute_rope_for_local_shard(tokens, 0, pictures, request.device)
    return {
        "hidden_states": request.noise(1, tokens, 16, 1, 2, 2),
        "encoder_hidden_states": request.noise(1, request.sizes.text, 4096),
        "timestep": request.timestep,
        "vis_freqs_cis": torch.cat([table.float() for table in tables], dim=-1),
    }


HELIOS_HISTORY = (16, 2, 1)
"""Latent frames of the history: far, nearer, and the last one. The very first frame comes before all of them."""


def _helios(module: Any, config: Any, request: Request) -> Inputs:
    frames, height, width = request.latent(8, 4)
    places = torch.arange(1 + sum(HELIOS_HISTORY) + frames, device=request.device)[None]
    first, far, near, last, new = torch.split(places, [1, *HELIOS_HISTORY, frames], dim=1)
    named = {"long": far, "mid": near, "short": torch.cat([first, last], dim=1)}
    return {
        "hidden_states": request.noise(1, 16, frames, height, width),
        "encoder_hidden_states": request.noise(1, request.sizes.text, 4096),
        "timestep": request.timestep,
        "indices_hidden_states": new,
        **{f"indices_latents_history_{name}": at for name, at in named.items()},
        **{f"latents_history_{name}": request.noise(1, 16, at.shape[1], height, width) for name, at in named.items()},
    }


def _mova(module: Any, config: Any, request: Request) -> Inputs:
    module._init_freqs()
    latent = (request.sizes.audio,) if request.sizes.audio else request.latent(8, 4)
    return {
        "hidden_states": request.noise(1, config.arch_config.in_dim, *latent),
        "encoder_hidden_states": request.noise(1, request.sizes.text, 4096),
        "timestep": request.timestep,
    }


class _Decoder(torch.nn.Module):
    """The decoder of a VAE as a module of its own."""

    def __init__(self, vae: torch.nn.Module) -> None:
        super().__init__()
        self.vae = vae

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Pixels of a latent."""
        decoded: torch.Tensor = self.vae.decode(hidden_states)  # type: ignore[operator]
        return decoded


def _hunyuan_vae(module: Any, config: Any, request: Request) -> Inputs:
    return {"hidden_states": request.noise(1, config.arch_config.latent_channels, *request.latent(8, 4))}


INPUTS: dict[str, Callable[[Any, Any, Request], Inputs]] = {
    "qwen_image": _qwen_image,
    "qwen_edit": _qwen_edit,
    "wan": _wan,
    "wan_i2v": _wan_i2v,
    "wan_ti2v": _wan_ti2v,
    "hunyuanvideo": _hunyuanvideo,
    "zimage": _zimage,
    "flux": _flux,
    "ltx2": _ltx2,
    "joyimage_edit": _joyimage_edit,
    "helios": _helios,
    "mova_video": _mova,
    "mova_audio": _mova,
    "hunyuan_vae": _hunyuan_vae,
}
"""Key `build` of a known model -> the function that makes its inputs."""
MOVING: dict[str, Callable[[int], int]] = {
    "qwen_edit": lambda tokens: tokens // 2,
    "joyimage_edit": lambda tokens: tokens // 2,
    "wan_i2v": lambda _: 16,
    "hunyuan_vae": lambda _: 0,
}
"""Key `build` -> `Built.moving` from the size of dimension 1, if this dimension holds more than the latent: the tokens
or channels of an input picture. The decoder has 0, as it does not denoise."""
