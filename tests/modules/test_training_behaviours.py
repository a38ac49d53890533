"""What a training loop does to every module: saved-tensor hooks, offload, tied weights, moves."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

import dist_finegrain as dfg
from dist_finegrain import factories
from tests.modules.training_cases import (
    KINDS,
    TOKENS,
    Block,
    H,
    assert_same,
    data,
    gradients,
    states,
    step,
)
from tests.recipes import ALL, PLAIN, emulated

STATELESS = sorted(set(ALL) - {"delayed", "delayed_children"})


def weight_names(layer) -> list[str]:
    """Names of the matrices that GEMMs multiply by."""
    return [name for name, p in layer.named_parameters() if p.dim() == 2]


# Saved tensors.
@pytest.mark.parametrize("name", sorted(ALL))
@pytest.mark.parametrize("kind", KINDS)
def test_save_on_cpu_changes_nothing(kind, name):
    """Bug case 40: y, dX and all gradients, also of the second step of delayed scaling."""
    recipe, plain, block = emulated(ALL[name]), Block(kind), Block(kind)
    optimizer = torch.optim.SGD([*plain.parameters(), *block.parameters()], lr=0.1)
    for seed in range(2):
        x, grad = data(seed)
        wanted = step(plain, x, grad, recipe)
        with save_on_cpu():
            got = step(block, x, grad, recipe)
        assert_same(got, wanted)
        optimizer.step()
    assert_same(states(block), states(plain))


@pytest.mark.parametrize("strides", [torch.preserve_format, torch.contiguous_format], ids=str)
@pytest.mark.parametrize("use_recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("name", ["identity", "guide", "block", "mxfp8_fwd_nvfp4_bwd", "delayed"])
@pytest.mark.parametrize("kind", KINDS)
def test_hooks_may_give_back_other_memory_of_square_matrices(kind, name, use_recompute, strides):
    """Bug case 40: packed by what they hold; a matrix and its transpose stay apart."""
    recipe, plain, block = emulated(ALL[name]), Block(kind), Block(kind)
    x, grad = (torch.cat((half, half.roll(1, 1), half[: H - 2 * TOKENS])) for half in data())
    packed = []

    def pack(tensor):
        packed.append(tensor.detach().clone(memory_format=strides))
        return len(packed) - 1

    def unpack(index):
        return packed[index].clone()

    def call(x):
        return dfg.recompute(block, x) if use_recompute else block(x)

    wanted = step(plain, x, grad, recipe)
    with saved_tensors_hooks(pack, unpack):
        assert_same(step(block, x, grad, recipe, call), wanted)
    assert packed


@pytest.mark.parametrize("name", STATELESS)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_outlives_the_hooks(kind, name):
    """Bug case 40: what is packed away is freed; only parameters and x stay where they were."""
    block, (x, grad), recipe = Block(kind), data(), emulated(ALL[name])
    wanted = step(block, x, grad, recipe)
    block.zero_grad()
    leaf = x.clone().requires_grad_()
    kept = {t.untyped_storage().data_ptr() for t in (leaf, *block.parameters())}
    packed, storages = [], []

    def pack(tensor):
        if tensor.numel() and tensor.untyped_storage().data_ptr() not in kept:
            storages.append(StorageWeakRef(tensor.untyped_storage()))
        packed.append(tensor.detach().clone())
        return len(packed) - 1

    with saved_tensors_hooks(pack, packed.__getitem__), dfg.autocast(recipe=recipe):
        y = block(leaf)
    assert storages and all(storage.expired() for storage in storages)
    y.backward(grad)
    assert_same({"y": y.detach(), "dx": leaf.grad, **gradients(block)}, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["guide", "block", "current"])
@pytest.mark.parametrize("kind", KINDS)
def test_offloaded_activations_leave_the_gpu(kind, name):
    """Bug case 40 on a GPU: packed to the CPU and back, bit for bit, and nothing stays."""
    block, (x, grad), recipe = Block(kind).cuda(), data(), emulated(ALL[name])
    x, grad = x.cuda(), grad.cuda()
    wanted = step(block, x, grad, recipe)
    with save_on_cpu(pin_memory=True):
        assert_same(step(block, x, grad, recipe), wanted)


# Tied weights.
def by_name(role):
    """MXFP8 for the module "a", current scaling for the module "b"."""
    is_a = role is not None and role.name.startswith("a")
    return factories.mxfp8_factory(role) if is_a else factories.current_scaling_factory(role)


def tied_pair(kind):
    """Modules "a" and "b" with the same matrices."""
    a, b = Block(kind, name="a"), Block(kind, name="b")
    for name in weight_names(a.layer):
        setattr(b.layer, name, getattr(a.layer, name))
    return torch.nn.ModuleDict({"a": a, "b": b})


@pytest.mark.parametrize("kind", KINDS)
def test_tied_weights_in_two_formats(kind):
    """Bug case 20: gradients of both uses add up, both caches refresh, one tensor after load."""
    pair, recipe = tied_pair(kind), emulated(by_name)
    names = weight_names(pair["a"].layer)
    optimizer = torch.optim.SGD(pair.parameters(), lr=0.5)
    x, grad = data()
    for first in (True, False):  # the second step has no cache that is still valid
        alone = {key: step(copy.deepcopy(pair[key]), x, grad, recipe) for key in pair}
        assert not torch.equal(alone["a"]["y"], alone["b"]["y"])
        pair.zero_grad()
        with dfg.autocast(recipe=recipe):
            results = [module(x, is_first_microbatch=first) for module in pair.values()]
        for y, wanted in zip(results, alone.values(), strict=True):
            assert torch.equal(y, wanted["y"])
            y.backward(grad)
        for name in names:
            both = getattr(pair["a"].layer, name).grad
            assert torch.equal(both, sum(one[f"layer.{name}"] for one in alone.values()))
        optimizer.step()

    saved = {key: value + 1 for key, value in pair.state_dict().items()}
    with dfg.autocast(recipe=recipe), torch.no_grad():
        for module in pair.values():
            module(x, is_first_microbatch=True)
    pair.load_state_dict(saved)
    for name in names:
        assert getattr(pair["a"].layer, name) is getattr(pair["b"].layer, name)
        assert torch.equal(getattr(pair["a"].layer, name), saved[f"a.layer.{name}"])
    for module in pair.values():
        with dfg.autocast(recipe=recipe), torch.no_grad():
            assert torch.equal(module(x, is_first_microbatch=False), module(x))


# Microbatches and moves.
@pytest.mark.parametrize("name", STATELESS)
@pytest.mark.parametrize("kind", KINDS)
def test_two_microbatches_add_their_gradients(kind, name):
    """Bug case 12: a cached weight gives the gradients of two uncached forwards."""
    recipe, cached, plain = emulated(ALL[name]), Block(kind), Block(kind)
    results = []
    for block, microbatches in ((cached, (True, False)), (plain, (None, None))):
        outputs = []
        for seed, first in enumerate(microbatches):
            x, grad = data(seed)
            with dfg.autocast(recipe=recipe):
                outputs.append(block(x, is_first_microbatch=first))
            outputs[-1].backward(grad)
        results.append({"y": outputs[0], "second": outputs[1], **gradients(block)})
    assert_same(*results)


@pytest.mark.parametrize(
    "move",
    [
        lambda m: m.to("cpu"),
        lambda m: m.to(torch.bfloat16),
        lambda m: m.to(torch.bfloat16).to(torch.float32),
        lambda m: m._apply(lambda t: t.clone()),
    ],
    ids=["same_device", "bfloat16", "there_and_back", "other_memory"],
)
@pytest.mark.parametrize("name", ["mxfp8", "guide", "delayed", "nvfp4"])
@pytest.mark.parametrize("kind", KINDS)
def test_moving_between_microbatches_drops_what_was_kept(kind, name, move):
    """Bug case 40: a second microbatch after .to() reads the weight as it is then."""
    recipe, block = emulated(ALL[name]), Block(kind)
    x, grad = data()
    step(block, x, grad, recipe, is_first_microbatch=True)
    move(block)
    twin, dtype = copy.deepcopy(block), block.inner.weight.dtype
    got = step(block, x.to(dtype), grad, recipe, is_first_microbatch=False)
    assert_same(got, step(twin, x.to(dtype), grad, recipe))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mxfp8", "guide", "delayed"])
@pytest.mark.parametrize("kind", KINDS)
def test_cached_weights_leave_the_gpu_with_the_module(kind, name):
    """Bug case 40: memory is freed by .to("cpu"); back on the GPU the bits are the same."""
    recipe, (x, grad) = emulated(PLAIN.get(name, ALL[name])), data()
    x, grad = x.cuda(), grad.cuda()
    step(Block(kind).cuda(), x, grad, recipe)  # workspaces of the process
    before = torch.cuda.memory_allocated()
    block = Block(kind).cuda()
    wanted = step(block, x, grad, recipe, is_first_microbatch=True)
    block.zero_grad()
    block.to("cpu")
    on_host = {key: value.cpu() for key, value in wanted.items()}
    del wanted
    assert torch.cuda.memory_allocated() <= before
    got = step(block.cuda(), x, grad, recipe, is_first_microbatch=False)
    assert_same({key: value.cpu() for key, value in got.items()}, on_host)
