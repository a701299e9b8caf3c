"""Rotary positions (RoPE, arXiv 2104.09864) and the ways to stretch them beyond the trained length."""

import math

import torch
from torch import Tensor

from models.llama.config import BETA_FAST, BETA_SLOW, LlamaConfig, RopeScaling


def rope_table(config: LlamaConfig, max_positions: int, device: torch.device | str = "cpu") -> Tensor:
    """cos and sin of every position's angles: [max_positions, head_dim] float32, cosines first.

    Computed in float64. "dynamic" scaling depends on the context length; it is that of `max_positions` from the first
    token on, because keys are cached rotated and a base that grows with the sequence would leave the old ones behind.
    """
    inverse, amplitude = _angles(config, max_positions)
    angles = torch.arange(max_positions, dtype=torch.float64)[:, None] * inverse
    return (torch.cat([angles.cos(), angles.sin()], dim=1) * amplitude).to(device=device, dtype=torch.float32)


def _angles(config: LlamaConfig, max_positions: int) -> tuple[Tensor, float]:
    """(angles per position [head_dim / 2], factor of cos and sin)."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    inverse = config.rope_theta**-exponents
    scaling = config.rope_scaling
    if scaling is None:
        return inverse, 1.0
    factor, original = scaling.values["factor"], scaling.original_context
    if scaling.kind == "linear":  # position interpolation, arXiv 2306.15595
        return inverse / factor, 1.0
    if scaling.kind == "dynamic":  # NTK-aware: a larger base, so that only the slow dimensions are stretched
        growth = factor * max(max_positions, original) / original - (factor - 1)
        return (config.rope_theta * growth ** (config.head_dim / (config.head_dim - 2))) ** -exponents, 1.0
    if scaling.kind == "yarn":
        return _yarn(config, scaling, inverse)
    # llama3: keep the fast dimensions, divide the slow ones, blend between (Llama 3.1 reference code)
    low, high = scaling.values["low_freq_factor"], scaling.values["high_freq_factor"]
    keep = ((original * inverse / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
    return inverse * keep + inverse / factor * (1 - keep), 1.0


def _yarn(config: LlamaConfig, scaling: RopeScaling, inverse: Tensor) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071): dimensions that turn often keep their angles, those that turn rarely are divided."""
    values, factor, dims = scaling.values, scaling.values["factor"], config.head_dim

    def border(turns: float) -> float:
        """The dimension pair that makes `turns` full turns over the original context."""
        return dims * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low, high = border(values.get("beta_fast", BETA_FAST)), border(values.get("beta_slow", BETA_SLOW))
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    ramp = ((torch.arange(dims // 2, dtype=torch.float64) - low) / ((high - low) or 1e-3)).clamp(0, 1)

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    amplitude = values.get("attention_factor")
    if amplitude is None:
        over, under = values.get("mscale", 0.0), values.get("mscale_all_dim", 0.0)
        amplitude = mscale(over) / mscale(under) if over and under else mscale(1.0)
    return inverse * (1 - ramp) + inverse / factor * ramp, amplitude
