"""What a training loop does to LayerNormLinear and LayerNormMLP besides forward and backward."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import dist_finegrain as dfg
from dist_finegrain import factories
from tests.modules.layernorm_cases import MODULES, F, H, assert_same, make, run
from tests.recipes import ALL, PLAIN, emulated


def states(module):
    """Scales and histories by slot of every part."""
    return {
        (part.name, *key): (slot.scale.clone(), slot.history.clone())
        for part in module.modules()
        for key, slot in getattr(part, "_delayed", {}).items()
    }


def end_step(module):
    """End a step without changing a weight."""
    torch.optim.SGD(module.parameters(), lr=0.0).step()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["mxfp8", "guide", "delayed", "nvfp4_stochastic"])
@pytest.mark.parametrize("kind", MODULES)
def test_recomputation_outside_of_autocast(kind, name, reentrant):
    """Bug cases 14, 15: values, gradients, scales and histories as without, bit for bit."""
    recipe, x = emulated(ALL[name]), torch.randn(24, H)
    plain, module = make(kind), make(kind)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, module)]
    for _ in range(3):
        wanted = run(plain, x, recipe)
        module.zero_grad()
        leaf = x.clone().requires_grad_()
        with dfg.autocast(recipe=recipe):
            y = checkpoint(module, leaf, use_reentrant=reentrant)
        y.backward(torch.ones_like(y))
        gradients = {n: p.grad for n, p in module.named_parameters()}
        assert_same({"y": y.detach(), "dx": leaf.grad, **gradients}, wanted)
        for optimizer in optimizers:
            optimizer.step()
    theirs = states(plain)
    assert bool(theirs) == (name == "delayed")
    for key, pair in states(module).items():
        assert all(map(torch.equal, pair, theirs[key])), key


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("kind", MODULES)
def test_copies_train_on_their_own(kind, copied):
    """Bug case 29."""
    module, x = make(kind), torch.randn(16, H)
    recipe = emulated(PLAIN["delayed"])
    run(module, x, recipe)
    end_step(module)
    before, weights = states(module), {k: v.clone() for k, v in module.state_dict().items()}
    twin = copied(module)
    assert_same(run(copied(module), x, recipe), run(twin, x, recipe))
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(2):
        run(twin, x * 100, recipe)
        optimizer.step()
    assert_same(module.state_dict(), weights)
    assert all(torch.equal(states(module)[k][0], before[k][0]) for k in before)
    assert any(not torch.equal(states(twin)[k][0], before[k][0]) for k in before)
    for parameter in twin.parameters():
        assert not any(parameter is other for other in module.parameters())
    if kind == "mlp":
        assert twin.fc2.weight is twin.fc2_weight and twin.fc2._whole is twin
        twin.name = "other"
        assert (twin.fc1.name, module.fc1.name) == ("other.fc1", "demo.fc1")


@pytest.mark.parametrize("kind", MODULES)
def test_microbatches_keep_the_quantized_weights(kind):
    recipe, x = emulated(factories.mxfp8_factory), torch.randn(16, H)
    module = make(kind)
    wanted = run(module, x, recipe)
    run(module, x, recipe, is_first_microbatch=True)
    weights = [n for n, p in module.named_parameters() if p.dim() == 2]
    kept = {n: getattr(module, n).detach().clone() for n in weights}
    with torch.no_grad():
        for name in weights:
            getattr(module, name).mul_(3)
    assert_same(run(module, x, recipe, is_first_microbatch=False), wanted)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    optimizer.step()
    changed = run(module, x, recipe, is_first_microbatch=False)
    assert not torch.equal(changed["y"], wanted["y"])
    module.load_state_dict({**module.state_dict(), **kept})  # drops what is kept
    assert_same(run(module, x, recipe, is_first_microbatch=False), wanted)


@pytest.mark.parametrize("kind", MODULES)
def test_moves_and_loads_reach_the_parts(kind):
    module, x = make(kind), torch.randn(16, H)
    run(module, x, emulated(PLAIN["delayed"]))
    end_step(module)
    assert any(scale != 1 for scale, _ in states(module).values())
    module.load_state_dict(module.state_dict())
    assert all(scale == 1 for scale, _ in states(module).values())
    module.to(torch.bfloat16)
    assert all(p.dtype == torch.bfloat16 for p in module.parameters())
    assert run(module, x.bfloat16(), emulated(PLAIN["mxfp8"]))["y"].dtype == torch.bfloat16
    meta = make(kind, device="cpu").to("meta").to_empty(device="cpu")
    meta.load_state_dict(module.float().state_dict())
    assert_same(run(meta, x, None), run(module, x, None))


@pytest.mark.parametrize("kind", MODULES)
def test_eval_and_no_grad_between_training_steps(kind):
    recipe, x = emulated(PLAIN["delayed"]), torch.randn(16, H)
    module, fresh = make(kind), make(kind)
    module.eval()
    with torch.no_grad(), dfg.autocast(recipe=recipe):
        module(x * 100)
    module.train()
    assert_same(run(module, x, recipe), run(fresh, x, recipe))


@pytest.mark.parametrize("name", ["identity", "mxfp8"])
@pytest.mark.parametrize("kind", MODULES)
def test_main_grad_and_delayed_weight_gradients(kind, name):
    """Bug case 19 for both layers: what reaches main_grad is what .grad would have been."""
    recipe, x = emulated(PLAIN[name]), torch.randn(16, H)
    wanted = run(make(kind, bias=False), x, recipe)
    weights = [n for n in wanted if n.endswith("weight") and not n.startswith("layer_norm")]
    for delay in (False, True):
        module = make(kind, bias=False, fuse_wgrad_accumulation=True, delay_wgrad_compute=delay)
        for weight in weights:
            parameter = getattr(module, weight)
            parameter.main_grad = torch.zeros_like(parameter)
        for _ in range(2):
            got = run(module, x, recipe)
            if delay:
                module.backward_dw()
        for weight in weights:
            assert got[weight] is None
            assert torch.equal(getattr(module, weight).main_grad, 2 * wanted[weight]), weight
        assert torch.equal(got["layer_norm_weight"], wanted["layer_norm_weight"])
    module = make(kind, bias=False, delay_wgrad_compute=True)
    run(module, x, recipe)
    module.backward_dw()
    for weight in weights:
        assert torch.equal(getattr(module, weight).grad, wanted[weight])


@pytest.mark.parametrize("kind", MODULES)
def test_frozen_weights_and_lora(kind):
    """Bug case 17: with everything frozen dX is the same and no gradient appears."""
    recipe, x = emulated(factories.mxfp8_factory), torch.randn(16, H)
    module = make(kind)
    wanted = run(module, x, recipe)
    module.requires_grad_(False)
    got = run(module, x, recipe)
    assert torch.equal(got["dx"], wanted["dx"])
    assert all(got[n] is None for n, _ in module.named_parameters())
    module.layer_norm_weight.requires_grad_(True)
    with dfg.autocast(recipe=recipe):
        module(x).sum().backward()  # x needs no gradient: the norm still trains
    assert torch.equal(module.layer_norm_weight.grad, wanted["layer_norm_weight"])


def test_layers_of_two_mlps_may_share_weights():
    """Bug case 20: tied weights get both gradients and stay one tensor."""
    first, second = make("mlp", name="a", bias=False), make("mlp", name="b", bias=False)
    second.fc1_weight = first.fc1_weight
    assert second.fc1.weight is first.fc1_weight
    recipe, x = emulated(factories.mxfp8_factory), torch.randn(16, H)
    alone = [run(m, x, recipe)["fc1_weight"].clone() for m in (first, second)]
    first.zero_grad()
    with dfg.autocast(recipe=recipe):
        (first(x).sum() + second(x).sum()).backward()
    torch.testing.assert_close(first.fc1_weight.grad, alone[0] + alone[1])


@pytest.mark.parametrize("kind", MODULES)
def test_saved_tensors_may_be_packed_away(kind):
    """Bug case 40: hooks that copy every saved tensor change nothing."""
    recipe, x = emulated(ALL["guide"]), torch.randn(16, H)
    wanted, packed = run(make(kind), x, recipe), []

    def pack(tensor):
        packed.append(tensor.shape)
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        assert_same(run(make(kind), x, recipe), wanted)
    assert (16, H) in packed and len(packed) > (4 if kind == "linear" else 8)


def test_sharded_marks_without_a_group():
    """Megatron's attributes, also after copies and to_empty()."""
    options = {"set_parallel_mode": True, "sequence_parallel": True, "tp_size": 2}
    module = dfg.LayerNormMLP(H, F, activation="swiglu", name="m", **options)
    meta = dfg.LayerNormMLP(H, F, activation="swiglu", device="meta", **options)
    for one in (module, copy.deepcopy(module), meta.to_empty(device="cpu")):
        assert one.fc1_weight.shape == (F, H) and one.fc2_weight.shape == (H, F // 2)
        whole = {"sequence_parallel": True}
        assert vars(one.layer_norm_weight) == vars(one.layer_norm_bias) == whole
        assert vars(one.fc2_bias) == whole
        sharded = {"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 2}
        assert vars(one.fc1_weight) == vars(one.fc1_bias) == sharded
        assert vars(one.fc2_weight) == {**sharded, "partition_dim": 1, "partition_stride": 1}
    linear = dfg.LayerNormLinear(H, F, parallel_mode="column", tp_size=2)
    assert vars(linear.layer_norm_weight) == {} and linear.weight.partition_dim == 0
