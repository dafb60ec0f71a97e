"""Delay the norm and the rotation of q and k until a model joins two streams of tokens, so that one op does it all.

HunyuanVideo's blocks norm q and k by one function of their module, and then call another one that rotates the tokens of
the clip, and writes q, k and v of clip and text side by side. FLUX's double blocks norm and rotate q and k of either
stream, and then join q, k and v, one after the other. Here the first function returns `Waiting` objects. The second one
calls the op: once for a tensor that holds both streams, else once for each stream, with its place in the joint tensor.
If the op refuses a call, or the arguments are others than those, the module's own functions get the tensors.

This file imports only PyTorch: `kda apply` copies it beside the solutions.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import torch

from .deferred_slices import MADE_BY, ORIGINAL, Refused  # a copy of both files is a package of another name

__all__ = ["ORIGINAL", "WAYS", "defer", "put", "take_back"]

Call = Callable[..., torch.Tensor]
"""The op, whose arguments are q, k, v, q_weight, k_weight, cos, sin, out, eps."""
FORWARD = "_kda_forward"
"""Attribute of a block: the forward that stood where one of ours stands."""


class Pair:
    """q and k of one stream that wait for their norm, and what the model's own function makes of them."""

    def __init__(self, q: Any, k: Any, norms: tuple[Any, Any], own: Callable[[], Any], angles: Any = None) -> None:
        self.heads, self.norms, self.angles, self._own = (q, k), norms, angles, own
        self._tensors: Any = None

    def tensors(self) -> Any:
        """What the model's own function makes of q and k. It may work in place, so it is called once."""
        if self._tensors is None:
            self._tensors = self._own()
        return self._tensors

    def arguments(self) -> tuple[Any, ...]:
        """The weights of q and k, and eps, for the op.

        Raises:
            Refused: the norms are none that the op has, or something asked for the tensors already.
        """
        q, k = self.norms
        usual = all(
            not getattr(norm, "cast_x_before_out_mul", False) and getattr(norm, "variance_size_override", None) is None
            for norm in self.norms
        )
        if self._tensors is not None or not usual or q.variance_epsilon != k.variance_epsilon:
            raise Refused
        return q.weight, k.weight, q.variance_epsilon


class Waiting:
    """q (0) or k (1) of a pair, or some tokens of it."""

    def __init__(self, pair: Pair, number: int, tokens: slice | None = None) -> None:
        self.pair, self.number, self.tokens = pair, number, tokens

    def __getitem__(self, key: Any) -> Any:
        """Some tokens: `x[:, :n]`; of anything else the tensor."""
        if self.tokens is None and isinstance(key, tuple) and len(key) == 2 and key[0] == slice(None):
            return Waiting(self.pair, self.number, key[1])
        return self.tensor()[key]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor(), name)

    def tensor(self) -> torch.Tensor:
        """As the model's own function leaves it."""
        made: torch.Tensor = self.pair.tensors()[self.number]
        return made if self.tokens is None else made[:, self.tokens]


def _made(value: Any) -> Any:
    return value.tensor() if isinstance(value, Waiting) else value


def _waiting(pair: Pair) -> tuple[Waiting, Waiting]:
    return Waiting(pair, 0), Waiting(pair, 1)


# --- HunyuanVideo


def _hunyuan_norm(own: Call) -> Callable[..., Any]:
    @functools.wraps(own)
    def norm(site: Any, q: Any, k: Any, q_norm: Any, k_norm: Any) -> Any:
        if torch.compiler.is_compiling():
            return own(site, q, k, q_norm, k_norm)
        return _waiting(Pair(q, k, (q_norm, k_norm), functools.partial(own, site, q, k, q_norm, k_norm)))

    return norm


def _hunyuan_join(own: Callable[..., Any], call: Call) -> Callable[..., Any]:
    @functools.wraps(own)
    def join(*arguments: Any) -> Any:
        clip_q, clip_k, clip_v, text_q, text_k, text_v, cos, sin = arguments
        if not all(isinstance(x, Waiting) for x in (clip_q, clip_k, text_q, text_k)):
            return own(*map(_made, arguments))
        try:
            cos, sin = cos[: clip_v.shape[1]], sin[: clip_v.shape[1]]
            if clip_q.pair is text_q.pair:
                v = _whole(clip_v, text_v)
                weights = clip_q.pair.arguments()
                return tuple(call(*clip_q.pair.heads, v, *weights[:2], cos, sin, None, weights[2]).unbind(0))
            return tuple(_streams(call, (clip_q.pair, clip_v, cos, sin), (text_q.pair, text_v, None, None)).unbind(0))
        except Refused:
            return own(*map(_made, arguments))

    return join


def _whole(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """The tensor of which these are the first and the last tokens.

    Raises:
        Refused: they are not.
    """
    step = first.stride(1) * first.element_size()
    behind = second.data_ptr() - first.data_ptr() == first.shape[1] * step
    if first.stride() != second.stride() or not behind:
        raise Refused
    batch, _, heads, dim = first.shape
    return first.as_strided((batch, first.shape[1] + second.shape[1], heads, dim), first.stride())


def _streams(call: Call, *parts: tuple[Pair, torch.Tensor, Any, Any]) -> torch.Tensor:
    """The joint tensor of the streams, in this order: each is a pair, its v, cos and sin."""
    _, v, *_ = parts[0]
    batch, _, heads, dim = v.shape
    y = v.new_empty((3, batch, sum(v.shape[1] for _, v, *_ in parts), heads, dim))
    begin = 0
    for pair, v, cos, sin in parts:
        q_weight, k_weight, eps = pair.arguments()
        end = begin + v.shape[1]
        call(*pair.heads, v, q_weight, k_weight, cos, sin, y[:, :, begin:end], eps)
        begin = end
    return y


# --- FLUX


class _Joining:
    """What a block's attention has joined so far."""

    def __init__(self) -> None:
        self.pairs: tuple[Pair, Pair] | None = None
        self.joint: torch.Tensor | None = None


class _Running(threading.local):
    """The attention of the double blocks that run in this thread; q, k and v are joined one after the other."""

    def __init__(self) -> None:
        self.blocks: list[_Joining] = []


_running = _Running()


def _flux_norm(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def norm(*unnamed: Any, **given: Any) -> Any:
        cache = given.get("cos_sin_cache")
        known = not unnamed and given.get("positions") is None and not given.get("is_neox")
        if torch.compiler.is_compiling() or not _running.blocks or cache is None or not known:
            return own(*unnamed, **given)
        q, begin = given["q"], given.get("position_offset", 0)
        angles = cache[begin : begin + q.shape[1]]
        pair = Pair(q, given["k"], (given["q_norm"], given["k_norm"]), lambda: own(**given), angles)
        return _waiting(pair)

    return norm


def _flux_join(own: Callable[..., Any], call: Call) -> Callable[..., Any]:
    """The joint tensor exists from q's join on, and is filled when v is joined: nothing reads it before."""

    @functools.wraps(own)
    def join(prefix: Any, body: Any, pad: int, dim: int = 1) -> Any:
        if torch.compiler.is_compiling():
            return own(prefix, body, pad, dim)
        block = _running.blocks[-1] if _running.blocks else _Joining()
        both = isinstance(prefix, Waiting) and isinstance(body, Waiting)
        if pad or dim != 1 or (block.pairs is None and not both):
            return own(_made(prefix), _made(body), pad, dim)
        if both:
            if block.joint is None:
                text, picture = prefix.pair.heads[0], body.pair.heads[0]
                batch, _, heads, size = text.shape
                block.pairs = (prefix.pair, body.pair)
                block.joint = text.new_empty((3, batch, text.shape[1] + picture.shape[1], heads, size))
            return block.joint[prefix.number]
        assert block.pairs is not None
        assert block.joint is not None
        begin = 0
        for pair, v in zip(block.pairs, (prefix, body), strict=True):
            out = block.joint[:, :, begin : begin + v.shape[1]]
            try:
                q_weight, k_weight, eps = pair.arguments()
                call(*pair.heads, v, q_weight, k_weight, pair.angles, None, out, eps)
            except Refused:
                for plane, x in zip(out, (*pair.tensors(), v), strict=True):
                    plane.copy_(x)
            begin += v.shape[1]
        joint, block.pairs, block.joint = block.joint, None, None
        return joint[2]

    return join


def defer(block: Any, _name: str, _op: str, _call: Call) -> None:
    """Have the attention of FLUX's double blocks say that it runs. Those of its single blocks join nothing.

    Blocks of other models stay as they are: their functions get both streams at once.
    """
    if getattr(block, "added_kv_proj_dim", None) is None or FORWARD in vars(block):
        return
    own = functools.partial(type(block).forward, block)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return own(*args, **kwargs)
        _running.blocks.append(_Joining())
        try:
            return own(*args, **kwargs)
        finally:
            _running.blocks.pop()

    setattr(block, FORWARD, own)
    block.forward = forward


# --- both


class Way(NamedTuple):
    """How a model joins."""

    norm: str
    """The function of its module that norms q and k."""
    defer: Callable[..., Any]
    """What stands in that function's place, made of it."""
    join: Callable[..., Any]
    """What stands in the joining function's place, made of it and the op."""


WAYS: Mapping[str, Way] = {
    "_hunyuan_pack_qkv": Way("_hunyuan_qknorm", _hunyuan_norm, _hunyuan_join),
    "join_seqs": Way("apply_qk_norm_with_optional_rope", _flux_norm, _flux_join),
}
"""Name of the module's function that joins -> how."""


def put(module: ModuleType, name: str, blocks: Iterable[torch.nn.Module], op: str, call: Call) -> None:
    """Make the module's function `name`, which joins, give its work to the op `call`."""
    way = WAYS[name]
    _restore(module, name)
    for place, made in (
        (way.norm, way.defer(getattr(module, way.norm))),
        (name, way.join(getattr(module, name), call)),
    ):
        setattr(made, MADE_BY, getattr(module, place))
        setattr(module, place, made)
    for block in blocks:
        defer(block, name, op, call)


def take_back(module: ModuleType, name: str, blocks: Iterable[torch.nn.Module]) -> None:
    """Undo `put`."""
    _restore(module, name)
    for block in blocks:
        if vars(block).pop(FORWARD, None) is not None:
            vars(block).pop("forward")


def _restore(module: ModuleType, name: str) -> None:
    for place in (WAYS[name].norm, name):
        made = getattr(module, place)
        setattr(module, place, getattr(made, MADE_BY, made))
