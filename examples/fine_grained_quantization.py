"""One recipe, three kinds of precision: a format per GEMM in fc1, BF16 in fc2, MXFP8 elsewhere.

    python examples/fine_grained_quantization.py

Prints what each GEMM becomes and the loss of a few training steps on a fixed regression task.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

if not __package__:  # run as a file: make the examples package importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import dist_finegrain as dfg
from dist_finegrain.factories import mxfp8_factory, nvfp4_factory
from dist_finegrain.recipe import CustomRecipe
from examples.execution import choose_execution

FEATURES = 128
STEPS = 10


def quantizer_factory(role: dfg.QuantizerRole | None) -> dfg.Quantizer:
    """Called once per slot; the role says which module's tensor it is, None at a boundary."""
    name = role.name if role is not None else ""
    if name == "demo.fc2":
        return dfg.IdentityQuantizer()  # all three GEMMs of this module stay in BF16
    if name == "demo.fc1":
        if role.tensor_type == "input":  # MXFP8 for fprop, the BF16 original for wgrad
            return dfg.HybridQuantizer(
                rowwise_quantizer=mxfp8_factory(role),
                columnwise_quantizer=dfg.IdentityQuantizer(),
                columnwise_source="original",
            )
        if role.tensor_type == "weight":  # MXFP8 for fprop, for dgrad NVFP4 of what fprop saw
            return dfg.HybridQuantizer(
                rowwise_quantizer=mxfp8_factory(role),
                columnwise_quantizer=nvfp4_factory(role),
                columnwise_source="rowwise_dequantized",
            )
        if role.tensor_type == "grad_output":  # NVFP4 for dgrad, the BF16 original for wgrad
            return dfg.HybridQuantizer(
                rowwise_quantizer=nvfp4_factory(role),
                columnwise_quantizer=dfg.IdentityQuantizer(),
                columnwise_source="original",
            )
    return mxfp8_factory(role)  # boundary slots and every other module


def build_model(device: str | None = None) -> torch.nn.Sequential:
    """Three linears whose names the factory sees; BF16 parameters."""

    def linear(name: str) -> dfg.Linear:
        return dfg.Linear(FEATURES, FEATURES, params_dtype=torch.bfloat16, device=device, name=name)

    return torch.nn.Sequential(
        linear("demo.stem"), linear("demo.fc1"), torch.nn.GELU(), linear("demo.fc2")
    )


def main() -> None:
    """Print the plan, train, print the losses."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(choose_execution(device))
    torch.manual_seed(0)
    model = build_model(device)
    recipe = CustomRecipe(qfactory=quantizer_factory)
    print(dfg.plan(model, recipe, tokens=256))

    inputs = torch.randn(256, FEATURES, dtype=torch.bfloat16, device=device)
    targets = inputs.roll(1, dims=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        with dfg.autocast(enabled=True, recipe=recipe):
            output = model(inputs)
        loss = torch.nn.functional.mse_loss(output.float(), targets.float())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
