"""The arm to beat: `config.toml` has torch.compile make one function of each of these.

No release of SGLang has a function for channels-last order. The statements behind the ops are in
`HunyuanVideoResnetBlockCausal3D`, `HunyuanVideoCausalConv3d` and `HunyuanVideoUpsampleCausal3D` of SGLang's
hunyuanvae.py, 0.5.12.post1 and 0.5.23, for clips in the order [B, C, T, H, W].
"""

from .eager import bias_residual, group_norm_silu_pad, upsample_pad

__all__ = ["bias_residual", "group_norm_silu_pad", "upsample_pad"]
