"""GroupedLinear on a GPU: steps like the CPU's, no wait for the device, weights read in place."""

from __future__ import annotations

import pytest
import torch

import dist_finegrain as dfg
from tests.benchmarks.timing import count_launches
from tests.modules.grouped_linear_cases import assert_equal, data, make, run
from tests.recipes import ALL

pytestmark = pytest.mark.gpu

K, N, SPLIT = 256, 384, [40, 0, 100, 4]
DTYPE = torch.bfloat16


def recipe_of(name):
    return dfg.CustomRecipe(ALL[name], execution="emulate", fast_accumulation=())


def layer(**options):
    return make(DTYPE, k=K, n=N, **options)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", sorted(ALL))
def test_a_step_on_cuda_is_that_of_the_cpu(name, bias):
    """Grouped where there are kernels, expert by expert elsewhere; within BF16 rounding."""
    x, grad = data(SPLIT, DTYPE, K, N)
    on_cpu = run(layer(bias=bias), x, SPLIT, recipe_of(name), grad)
    on_cuda = run(layer(bias=bias).cuda(), x.cuda(), SPLIT, recipe_of(name), grad.cuda())
    for index, (got, wanted) in enumerate(zip(on_cuda, on_cpu, strict=True)):
        difference = (got.cpu().double() - wanted.double()).norm()
        assert difference <= 2.0**-6 * wanted.double().norm() + 1e-12, index


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", ["row", "mxfp8", "current", "identity", "delayed"])
def test_sizes_on_the_device_give_the_lists_bits_without_a_wait(name, bias):
    x, grad = (t.cuda() for t in data(SPLIT, DTYPE, K, N))
    recipe = recipe_of(name)
    on_device = torch.tensor(SPLIT, device="cuda")
    module, other = layer(bias=bias).cuda(), layer(bias=bias).cuda()
    run(other, x, on_device, recipe, grad)  # resolves; the delayed scales do not move yet
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = run(other, x, on_device, recipe, grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    wanted = run(module, x, SPLIT, recipe, grad)
    if name == "identity":  # one kernel both ways; cuBLASLt needs the list
        assert_equal(got[: 2 + len(SPLIT)], wanted[: 2 + len(SPLIT)])
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-6, atol=2**-6 * b.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_main_grad_takes_what_grad_would_have_been(dtype):
    """Bug case 19: before its rounding, and added to what was there."""
    x, grad = (t.cuda() for t in data(SPLIT, DTYPE, K, N))
    gradients = run(layer().cuda(), x, SPLIT, recipe_of("row"), grad)[2:]
    module = layer(fuse_wgrad_accumulation=True).cuda()
    for weight in module.weights:
        weight.main_grad = torch.ones(N, K, dtype=dtype, device="cuda")
    run(module, x, SPLIT, recipe_of("row"), grad)
    for weight, gradient in zip(module.weights, gradients, strict=True):
        wanted, size = 1 + gradient.float(), gradient.abs().max().item()
        torch.testing.assert_close(weight.main_grad.float(), wanted, rtol=2**-7, atol=2**-7 * size)


def test_main_grad_with_sizes_on_the_device_takes_the_kernels_rounding():
    """torch's grouped kernel gives BF16, which main_grad is raised by."""
    x, grad = (t.cuda() for t in data(SPLIT, DTYPE, K, N))
    split, recipe = torch.tensor(SPLIT, device="cuda"), recipe_of("row")
    gradients = run(layer().cuda(), x, split, recipe, grad)[2:]
    module = layer(fuse_wgrad_accumulation=True).cuda()
    for weight in module.weights:
        weight.main_grad = torch.ones(N, K, device="cuda")
    run(module, x, split, recipe, grad)
    for weight, gradient in zip(module.weights, gradients, strict=True):
        assert torch.equal(weight.main_grad, 1 + gradient.float())


def test_weights_that_lie_together_are_not_copied():
    """Row-scaled FP8: launches of a step; weights elsewhere cost one more, their copy."""
    x, grad = (t.cuda() for t in data(SPLIT, DTYPE, K, N))
    recipe, launches = recipe_of("row"), []
    for is_apart in (False, True):
        module = layer().cuda()
        if is_apart:
            for weight in module.weights:
                weight.data = weight.data.clone()

        def step(_, module=module):
            with dfg.autocast(recipe=recipe):
                y = module(x, SPLIT)
            return torch.autograd.grad(y, module.weights, grad)

        step(None)
        launches.append(count_launches(step, None))
    assert launches[1] > launches[0]
