"""Linear on a GPU: planes equal the CPU's byte for byte; native and emulated steps train."""

from __future__ import annotations

import pytest
import torch

import dist_finegrain as dfg
from dist_finegrain.formats.plane import DIRECTIONS
from tests.recipes import ALL, PLAIN

pytestmark = pytest.mark.gpu

SPECIAL = [0.0, -0.0, 1e-30, -1e-38, 3e38, -3e38, float("nan"), float("inf"), -float("inf")]


@pytest.mark.parametrize("name", sorted(set(ALL) - {"delayed", "delayed_children"}))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_planes_on_cuda_equal_those_on_the_cpu(name, dtype):
    """The reference on CUDA against the reference on the CPU: every magnitude, special values."""
    torch.manual_seed(0)
    x = torch.randn(200, 328) * 10.0 ** torch.randint(-12, 12, (200, 1))
    x[0, : len(SPECIAL)] = torch.tensor(SPECIAL)
    x = x.to(dtype)
    for tensor_type in ("input", "weight", "grad_output"):
        quantizer = ALL[name](dfg.QuantizerRole("linear", tensor_type, "demo.fc1"))
        for matrix in (x, x[1:].clone()):
            cpu, cuda = quantizer(matrix), quantizer(matrix.cuda())
            for direction in DIRECTIONS:
                for a, b in zip(
                    cpu.plane(direction).parts, cuda.plane(direction).parts, strict=True
                ):
                    assert (a is None) == (b is None)
                    if a is not None:
                        assert torch.equal(
                            a.contiguous().view(torch.uint8), b.cpu().contiguous().view(torch.uint8)
                        )


def step(module, x, grad, recipe):
    module.zero_grad()
    x = x.clone().requires_grad_()
    with dfg.autocast(recipe=recipe):
        y = module(x)
    y.backward(grad)
    return y.detach(), x.grad, module.weight.grad.clone(), module.bias.grad.clone()


@pytest.mark.parametrize("name", sorted(ALL))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_step_on_cuda_is_that_of_the_cpu(name, dtype):
    """Native where sm_90 has a kernel, emulated elsewhere; within BF16 rounding of the CPU's."""
    torch.manual_seed(0)
    module = dfg.Linear(256, 384, params_dtype=dtype, name="demo.fc1")
    x, grad = torch.randn(144, 256).to(dtype), torch.randn(144, 384).to(dtype)
    recipe = dfg.CustomRecipe(ALL[name], execution="emulate", fast_accumulation=())
    on_cpu = step(module, x, grad, recipe)
    module = module.cuda()
    module._delayed.clear()
    on_cuda = step(module, x.cuda(), grad.cuda(), recipe)
    for a, b in zip(on_cpu, on_cuda, strict=True):
        assert b.is_cuda and b.dtype == a.dtype
        error = (a.double() - b.cpu().double()).norm() / a.double().norm()
        assert error <= (2.0**-7 if dtype == torch.bfloat16 else 3e-4)


@pytest.mark.parametrize("name", ["current", "row", "block", "delayed", "identity"])
def test_native_mode_runs_without_emulation(name):
    module = dfg.Linear(256, 384, params_dtype=torch.bfloat16, device="cuda", name="fc")
    recipe = dfg.CustomRecipe(PLAIN[name], execution="native")
    result = dfg.plan(module, recipe)
    assert result.ok and not result.counts()["emulated"]
    x = torch.randn(2, 8, 256, device="cuda", dtype=torch.bfloat16)
    grad = torch.randn(2, 8, 384, device="cuda", dtype=torch.bfloat16)
    assert all(t.isfinite().all() for t in step(module, x, grad, recipe))


def test_mxfp8_in_native_mode_is_refused_on_hopper():
    module = dfg.Linear(256, 384, device="cuda", name="fc")
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("sm_90 only")
    with pytest.raises(ValueError, match="not native on sm_90"):
        recipe = dfg.CustomRecipe(PLAIN["mxfp8"], execution="native")
        step(module, torch.ones(16, 256).cuda(), torch.ones(16, 384).cuda(), recipe)


def test_moving_a_trained_module_moves_its_scales():
    module = dfg.Linear(64, 64, bias=False, name="fc")
    recipe = dfg.CustomRecipe(PLAIN["delayed"], execution="emulate")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    x = torch.randn(16, 64)
    with dfg.autocast(recipe=recipe):
        module(x).sum().backward()
    optimizer.step()
    scale = next(iter(module._delayed.values())).scale.clone()
    module.cuda()
    with dfg.autocast(recipe=recipe):
        module(x.cuda())
    slot = next(iter(module._delayed.values()))
    assert slot.scale.is_cuda and torch.equal(slot.scale.cpu(), scale)
