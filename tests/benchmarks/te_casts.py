"""Transformer Engine's quantizers for the lines of the cast benchmark that it can run."""

from __future__ import annotations

from collections.abc import Callable

import torch


def te_casts(device: torch.device) -> tuple[dict[str, Callable[[torch.Tensor], object]], str]:
    """(line of the benchmark → cast, version); ({}, why not) without Transformer Engine or a GPU.

    Only what its kernels really do on this GPU: before sm_100 its MXFP8 and NVFP4 casts are empty.
    """
    if device.type != "cuda":
        return {}, "no GPU"
    try:
        import transformer_engine
        import transformer_engine.pytorch as te
        import transformer_engine_torch as tex
    except (ImportError, OSError, RuntimeError) as error:  # as broken installations raise
        return {}, f"not importable ({error})"
    e4m3 = tex.DType.kFloat8E4M3
    scale, amax = torch.full((1,), 64.0, device=device), torch.zeros(1, device=device)

    def delayed(**usage):
        return te.Float8Quantizer(scale, amax, e4m3, **usage)

    def block(dim: int, **usage):
        usage = {"rowwise": True, "columnwise": True} | usage
        return te.Float8BlockQuantizer(e4m3, block_scaling_dim=dim, **usage)

    makers = {
        "per-tensor delayed both": delayed,
        "per-tensor delayed, row only": lambda: delayed(columnwise=False),
        "per-tensor current both": lambda: te.Float8CurrentScalingQuantizer(e4m3, device),
        "block 1-D both": lambda: block(1),
        "block 1-D, row only": lambda: block(1, columnwise=False),
        "block 2-D both": lambda: block(2),
    }
    if hasattr(te, "HybridQuantizer"):
        for source in ("original", "rowwise_dequantized"):
            makers[f"hybrid block|block, {source}"] = lambda source=source: te.HybridQuantizer(
                rowwise_quantizer=block(1), columnwise_quantizer=block(1), columnwise_source=source
            )
    if torch.cuda.get_device_capability(device) >= (10, 0):
        makers["MXFP8 both"] = lambda: te.MXFP8Quantizer(e4m3)
        makers["NVFP4 both, nearest, amax included"] = lambda: te.NVFP4Quantizer()
        makers["NVFP4 both, RHT column, amax included"] = lambda: te.NVFP4Quantizer(
            with_rht=True, with_post_rht_amax=True
        )
    casts = {}
    for name, make in makers.items():
        try:
            casts[name] = make()
        except (AttributeError, TypeError, ValueError):  # another version of Transformer Engine
            continue
    return casts, getattr(transformer_engine, "__version__", "unknown")
