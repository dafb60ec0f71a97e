"""Write a tiny Qwen3 with random weights and a byte-level tokenizer, as a folder that every engine can load.

With it a real server, a real load generator and the whole pipeline run on any machine without the Hub. The model has no
end-of-sequence token, so a request gets as many tokens as it asks for. Its text is noise and its speed says nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from kda_judge.contract.errors import MissingRequirement

NAME = "tiny"
SEED = 0
SPREAD = 0.02
"""Standard deviation of the weights."""
PAD = "<|pad|>"
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": False,
    "dtype": "float32",
    "eos_token_id": None,
    "bos_token_id": None,
}
"""As `config.json` has it."""


def write(folder: Path) -> Path:
    """Make the model in `folder` unless it is already there; returns the folder.

    Raises:
        MissingRequirement: the package safetensors is not installed.
    """
    try:
        from safetensors.numpy import save_file
    except ModuleNotFoundError:
        raise MissingRequirement(
            "safetensors is not installed, which writes the tiny model's weights: pip install 'kda-tools[llm]'"
        ) from None
    import numpy as np

    if (folder / "model.safetensors").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {letter: number for number, letter in enumerate(byte_letters())}
    pad = len(vocabulary)
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": pad,
                "content": PAD,
                "special": True,
                **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
            }
        ],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": {**vocabulary, PAD: pad}, "merges": []},
    }
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": PAD, "model_max_length": 4096}
    for name, content in (
        ("config.json", CONFIG),
        ("tokenizer.json", tokenizer),
        ("tokenizer_config.json", names),
        ("generation_config.json", {"pad_token_id": pad, "do_sample": False}),
    ):
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    draw = np.random.default_rng(SEED)
    weights = {
        name: np.ones(shape, np.float32) if "norm" in name else draw.normal(0, SPREAD, shape).astype(np.float32)
        for name, shape in _shapes()
    }
    partial = folder / ".model.safetensors"
    save_file(weights, partial, metadata={"format": "pt"})
    partial.rename(folder / "model.safetensors")  # last: a folder that has it is whole
    return folder


def byte_letters() -> list[str]:
    """For each byte in order, the letter that byte-level BPE writes for it: the byte itself if it is printable."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every weight of Qwen3 in transformers."""
    hidden, vocabulary = int(str(CONFIG["hidden_size"])), int(str(CONFIG["vocab_size"]))
    width, wide = int(str(CONFIG["head_dim"])), int(str(CONFIG["intermediate_size"]))
    queries, keys = (width * int(str(CONFIG[f"num_{kind}_heads"])) for kind in ("attention", "key_value"))
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for number in range(int(str(CONFIG["num_hidden_layers"]))):
        layer = f"model.layers.{number}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}{name}.weight", (hidden,)
        for name, size in (("q", queries), ("k", keys), ("v", keys)):
            yield f"{layer}self_attn.{name}_proj.weight", (size, hidden)
        for name in ("q_norm", "k_norm"):
            yield f"{layer}self_attn.{name}.weight", (width,)
        yield f"{layer}self_attn.o_proj.weight", (hidden, queries)
        for name in ("gate_proj", "up_proj"):
            yield f"{layer}mlp.{name}.weight", (wide, hidden)
        yield f"{layer}mlp.down_proj.weight", (hidden, wide)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocabulary, hidden)
