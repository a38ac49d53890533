"""quantized_model_init: weights that are held only quantized, from construction to optimizer."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import re
from pathlib import Path

import pytest
import torch

import dist_finegrain as dfg
from dist_finegrain import factories
from dist_finegrain.modules import linear_function
from dist_finegrain.modules.grouped_linear_function import GroupedCall
from tests.modules.training_cases import Block, H, assert_same, call, data, make_module, step
from tests.recipes import ALL, PLAIN, emulated, same_format_hybrid

KINDS = ("linear", "layernorm_linear", "layernorm_mlp", "grouped")
FORMATS = sorted(set(ALL) - {"delayed", "delayed_children", "nvfp4_stochastic"})


def matrices(module) -> dict[str, torch.nn.Parameter]:
    """The weights that GEMMs of quantized layers multiply by."""
    return {n: p for n, p in module.named_parameters() if p.dim() == 2 and "inner" not in n}


def stored(kind, recipe, preserve=False, cls=Block, **options):
    """A block (or a module) made with quantized weights."""
    with dfg.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=preserve):
        return cls(kind, **options)


def no_weight_casts(monkeypatch) -> None:
    """Fail where a forward casts an operand of the weights' shape."""
    run_casts = linear_function.run_casts

    def watched(jobs, *arguments):
        assert all(tuple(job.x.shape) != (H, H) for job in jobs), "a weight was cast"
        return run_casts(jobs, *arguments)

    def without(call, weights, rowwise, columnwise):
        assert not rowwise and not columnwise, "weights were cast"
        return dict.fromkeys(("rowwise", "columnwise"))

    monkeypatch.setattr(linear_function, "run_casts", watched)
    monkeypatch.setattr(GroupedCall, "cast_weights", without)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_equals_that_of_ordinary_weights_without_a_cast(kind, name, monkeypatch):
    """The same planes that a forward would make; gradients are high precision, bit for bit."""
    recipe, (x, grad) = emulated(ALL[name]), data()
    wanted = step(Block(kind), x, grad, recipe)
    block = stored(kind, recipe)
    for parameter_name, parameter in block.named_parameters():
        is_stored = isinstance(parameter, dfg.QuantizedTensor)
        is_matrix = parameter_name in matrices(block)
        assert is_stored == (is_matrix and name != "identity"), parameter_name
        assert isinstance(parameter, torch.nn.Parameter) and parameter.requires_grad
        if is_stored:
            assert parameter.get_usages() == {"rowwise": True, "columnwise": True}
    if name != "identity":
        no_weight_casts(monkeypatch)
    assert_same(step(block, x, grad, recipe), wanted)
    for parameter in block.parameters():
        assert type(parameter.grad) is torch.Tensor and parameter.grad.dtype == torch.float32


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
@pytest.mark.parametrize("kind", KINDS)
def test_backward_override_keeps_the_column_in_high_precision(kind, override, monkeypatch):
    recipe = emulated(PLAIN["mxfp8"], backward_override=override)
    (x, grad), wanted = data(), step(Block(kind), *data(), recipe)
    block = stored(kind, recipe)
    no_weight_casts(monkeypatch)
    assert_same(step(block, x, grad, recipe), wanted)


def test_a_high_precision_column_follows_torch_autocast():
    """What is held in FP32 is multiplied in BF16, as an ordinary weight is."""
    recipe, (x, grad) = emulated(PLAIN["mxfp8"], backward_override="high_precision"), data()
    plain, block = Block("linear"), stored("linear", recipe)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted, got = (step(one, x, grad, recipe) for one in (plain, block))
    assert torch.equal(got["dx"], wanted["dx"])


@pytest.mark.parametrize("name", ["block", "mxfp8", "mxfp8_2d", "nvfp4", "current"])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_a_module_of_the_dequantized_weights(kind, name):
    """Casting a dequantized weight again gives its values where the format is idempotent."""
    recipe, (x, grad) = emulated(PLAIN[name]), data()
    block, plain = stored(kind, recipe), Block(kind)
    plain.load_state_dict(block.state_dict())
    for parameter_name, weight in matrices(plain).items():
        assert type(weight) is torch.nn.Parameter
        assert torch.equal(weight, matrices(block)[parameter_name].dequantize())
    got, wanted = (step(one, x, grad, recipe) for one in (block, plain))
    if name in ("mxfp8", "current"):  # a column plane of the original is not one of the rows
        wanted = {k: wanted[k] for k in ("y", "layer.bias") if k in wanted}
        got = {k: got[k] for k in wanted}
    assert_same(got, wanted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outside_of_autocast_the_dequantized_weight_is_used(kind, dtype):
    recipe, (x, grad) = emulated(PLAIN["block"]), data()
    block = stored(kind, recipe, dtype=dtype)
    plain = Block(kind, dtype=dtype)
    block.inner.to(dtype), plain.inner.to(dtype)
    plain.load_state_dict(block.state_dict())
    x = x.to(dtype)
    assert_same(step(block, x, grad, None), step(plain, x, grad, None))
    with dfg.autocast(enabled=False):
        assert torch.equal(block(x), plain(x))


@pytest.mark.parametrize("name", ["mxfp8", "guide", "mxfp8_fwd_nvfp4_bwd"])
@pytest.mark.parametrize("kind", KINDS)
def test_torch_autocast_reads_what_is_stored(kind, name, monkeypatch):
    """FP32 parameters under BF16: the planes are those of FP32, Y is BF16, dW is FP32."""
    recipe, (x, grad) = emulated(ALL[name]), data()
    block = stored(kind, recipe)
    no_weight_casts(monkeypatch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = step(block, x, grad, recipe)
    assert got["y"].dtype == torch.bfloat16
    assert all(g.dtype == torch.float32 for key, g in got.items() if key != "y")
    full = step(block, x, grad, recipe)
    assert torch.allclose(got["y"].float(), full["y"], atol=0.2)


@pytest.mark.parametrize("kind", KINDS)
def test_first_layer_trains_though_its_input_needs_no_gradient(kind):
    """Bug case 18: a stored weight is a float leaf."""
    recipe, (x, grad) = emulated(PLAIN["mxfp8"]), data()
    module = stored(kind, recipe, cls=make_module)
    with dfg.autocast(recipe=recipe):
        call(module, x.requires_grad_()).backward(grad)
    wanted = {n: p.grad.clone() for n, p in module.named_parameters()}
    module.zero_grad()
    with dfg.autocast(recipe=recipe):
        call(module, x.detach()).backward(grad)
    assert_same({n: p.grad for n, p in module.named_parameters()}, wanted)


# Optimizers.
@pytest.mark.parametrize("name", ["mxfp8", "block", "guide", "nvfp4"])
@pytest.mark.parametrize("kind", KINDS)
def test_master_copy_trains_as_ordinary_fp32_weights(kind, name):
    """Three steps bit for bit: the masters are the weights that an ordinary module would have."""
    recipe, plain = emulated(ALL[name]), Block(kind)
    block = stored(kind, recipe, preserve=True)
    masters = {
        n: torch.nn.Parameter(p.get_high_precision_init_val().float())
        for n, p in matrices(block).items()
    }
    for weight in matrices(block).values():
        weight.clear_high_precision_init_val()
        assert weight.get_high_precision_init_val() is None
    rest = [p for n, p in block.named_parameters() if n not in masters]
    optimizer = torch.optim.Adam([*masters.values(), *rest, *plain.parameters()], lr=1e-2)
    for seed in range(3):
        x, grad = data(seed)
        assert_same(step(block, x, grad, recipe), step(plain, x, grad, recipe))
        for weight_name, master in masters.items():
            master.grad = matrices(block)[weight_name].grad.float()
        optimizer.step()
        with torch.no_grad():
            for weight_name, master in masters.items():
                matrices(block)[weight_name].copy_(master)


def test_loop_of_the_readme_trains():
    text = (Path(__file__).resolve().parents[2] / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    example = next(block for block in blocks if "get_high_precision_init_val" in block)
    recipe, (x, grad) = emulated(PLAIN["mxfp8"]), data()
    names = {"dfg": dfg, "torch": torch, "recipe": recipe}
    names["build_model"] = lambda: Block("layernorm_mlp")
    exec(example, names)
    losses = []
    for _ in range(8):
        names["optimizer"].zero_grad()
        with dfg.autocast(recipe=recipe):
            loss = (names["model"](x) - grad).square().mean()
        loss.backward()
        names["update"]()
        losses.append(loss.item())
    assert losses[-1] < losses[0] and len(names["masters"]) == 2


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("name", ["mxfp8", "block", "guide"])
@pytest.mark.parametrize("kind", KINDS)
def test_optimizers_write_into_the_stored_weight(kind, name, optimizer):
    """Without a master the update is applied to the dequantized weight and quantized again."""
    recipe, (x, grad) = emulated(ALL[name]), data()
    block = stored(kind, recipe)
    weights = matrices(block)
    step(block, x, grad, recipe)
    if optimizer is torch.optim.SGD:
        wanted = {}
        for weight_name, weight in weights.items():
            updated = torch.add(weight.dequantize().detach(), weight.grad, alpha=-0.1)
            wanted[weight_name] = weight._quantizer.copy()(updated)
    optimizer(block.parameters(), lr=0.1).step()
    for weight_name, weight in matrices(block).items():
        assert weight is weights[weight_name]
        if optimizer is torch.optim.SGD:
            for direction in ("rowwise", "columnwise"):
                got, plane = weight.plane(direction), wanted[weight_name].plane(direction)
                assert all(map(torch.equal, _buffers(got), _buffers(plane)))
    again = step(block, x, grad, recipe)
    assert again["y"].isfinite().all()
    block.zero_grad()
    losses = []
    trainer = optimizer(block.parameters(), lr=1e-2)
    for _ in range(12):
        trainer.zero_grad()
        with dfg.autocast(recipe=recipe):
            loss = (block(x) - grad).square().mean()
        loss.backward()
        trainer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", ["mxfp8", "block"])
def test_fused_optimizers_update_the_values_that_the_others_do(name):
    """Features that are no multiple of the block: the dequantized weight must not be a view."""
    weights = []
    for options in ({"fused": True}, {"foreach": False}):
        torch.manual_seed(0)
        with dfg.quantized_model_init(recipe=emulated(ALL[name])):
            module = dfg.Linear(60, 90, name="demo.fc")
        module.weight.grad = torch.randn(90, 60)
        torch.optim.AdamW([module.weight], lr=0.05, **options).step()
        weights.append(module.weight.dequantize().detach())
    scale = weights[1].abs().max()
    assert (weights[0] - weights[1]).abs().max() <= 2e-2 * scale  # one quantization step at most


def _buffers(plane):
    return [part for part in plane.parts if part is not None]


def test_a_weight_written_before_its_backward_is_noticed():
    """torch's own check of saved tensors sees the planes."""
    recipe, (x, grad) = emulated(PLAIN["mxfp8"]), data()
    block = stored("linear", recipe)
    with dfg.autocast(recipe=recipe):
        y = block(x)
    with torch.no_grad():
        block.layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(grad)


@pytest.mark.parametrize("options", [{}, {"delay_wgrad_compute": True}], ids=["now", "delayed"])
def test_main_grad_takes_the_weight_gradient(options):
    recipe, (x, grad) = emulated(PLAIN["mxfp8"]), data()
    wanted = step(Block("linear"), x, grad, recipe)["layer.weight"]
    block = stored("linear", recipe, fuse_wgrad_accumulation=True, **options)
    block.layer.weight.main_grad = torch.zeros(H, H)
    step(block, x, grad, recipe)
    block.layer.backward_dw()
    assert torch.equal(block.layer.weight.main_grad, wanted)
    late = stored("linear", recipe, delay_wgrad_compute=True)
    step(late, x, grad, recipe)
    late.layer.backward_dw()
    assert torch.equal(late.layer.weight.grad, wanted)


# The loop around.
@pytest.mark.parametrize("kind", KINDS)
def test_validation_microbatches_and_recompute(kind):
    """Bug case 13: validation, then training, with stored weights, also after optimizer.step()."""
    recipe, (x, grad) = emulated(ALL["mxfp8_fwd_nvfp4_bwd"]), data()
    block = stored(kind, recipe)
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    for _ in range(2):
        wanted = step(copy.deepcopy(block), x, grad, recipe)
        block.eval()
        with torch.no_grad(), dfg.autocast(recipe=recipe):
            for first in (True, False):
                assert torch.equal(block(x, is_first_microbatch=first), wanted["y"])
        block.train()
        assert_same(step(block, x, grad, recipe, is_first_microbatch=False), wanted)
        for reentrant in (False, True):
            again = functools.partial(dfg.recompute, block, use_reentrant=reentrant)
            assert_same(step(block, x, grad, recipe, again), wanted)
        with torch.autograd.graph.save_on_cpu():
            assert_same(step(block, x, grad, recipe), wanted)
        optimizer.step()


def _saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("name", ["mxfp8", "guide", "nvfp4", "row"])
@pytest.mark.parametrize("kind", KINDS)
def test_state_dict_round_trip(kind, name):
    """Bytes come back exactly; ordinary modules load it, and are loaded, strictly both ways."""
    recipe, (x, grad) = emulated(ALL[name]), data()
    block, other = stored(kind, recipe), stored(kind, recipe)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(3)
    wanted = step(block, x, grad, recipe)
    other.load_state_dict(_saved(block.state_dict()), strict=True)
    assert all(isinstance(p, dfg.QuantizedTensor) for p in matrices(other).values())
    assert_same(step(other, x, grad, recipe), wanted)

    plain = Block(kind)
    step(plain, x, grad, recipe)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(1.5)
    block.load_state_dict(plain.state_dict(), strict=True)
    assert_same(step(block, x, grad, recipe), step(plain, x, grad, recipe))
    plain.load_state_dict(block.state_dict(), strict=True)
    for weight_name, weight in matrices(plain).items():
        assert torch.equal(weight, matrices(block)[weight_name].dequantize())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("kind", KINDS)
def test_copies_and_moves(kind, copied):
    """Bug case 29: a copy trains alone and keeps its own initial value."""
    recipe, (x, grad) = emulated(PLAIN["block"]), data()
    block = stored(kind, recipe, preserve=True)
    twin = copied(block)
    for theirs, ours in zip(matrices(twin).values(), matrices(block).values(), strict=True):
        theirs.clear_high_precision_init_val()
        assert theirs.get_high_precision_init_val() is None
        assert ours.get_high_precision_init_val() is not None
    wanted = step(block, x, grad, recipe)
    assert_same(step(twin, x, grad, recipe), wanted)
    torch.optim.SGD(twin.parameters(), lr=1.0).step()
    assert_same(step(block, x, grad, recipe), wanted)
    block.to(torch.bfloat16)
    assert all(p.dtype == torch.bfloat16 for p in block.parameters())
    assert all(isinstance(p, dfg.QuantizedTensor) for p in matrices(block).values())
    got = step(block, x.bfloat16(), grad, recipe)
    assert got["y"].dtype == torch.bfloat16 and got["y"].isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_initial_value_is_kept_on_request_only(kind):
    recipe = emulated(PLAIN["mxfp8"])
    plain, block = make_module(kind), stored(kind, recipe, cls=make_module)
    kept = stored(kind, recipe, preserve=True, cls=make_module)
    for weight_name, weight in matrices(kept).items():
        value = weight.get_high_precision_init_val()
        assert type(value) is torch.Tensor and value.device.type == "cpu"
        assert torch.equal(value, getattr(plain, weight_name))
        assert not hasattr(getattr(block, weight_name), "get_high_precision_init_val")
        assert not hasattr(getattr(block, weight_name), "clear_high_precision_init_val")
    kept.reset_parameters()
    for weight in matrices(kept).values():
        assert isinstance(weight, dfg.QuantizedTensor)
        assert weight.get_high_precision_init_val() is None


def test_contexts_nest_and_end():
    """Innermost wins; leaving by an exception restores the one outside."""
    mxfp8, nvfp4 = emulated(PLAIN["mxfp8"]), emulated(PLAIN["nvfp4"])

    def family(**options):
        with dfg.quantized_model_init(**options):
            weight = dfg.Linear(H, H).weight
        is_stored = isinstance(weight, dfg.QuantizedTensor)
        return weight.rowwise_plane.format.family if is_stored else None

    with pytest.raises(ZeroDivisionError), dfg.quantized_model_init(recipe=mxfp8):
        assert family(enabled=False) is None
        assert family(recipe=nvfp4) == "nvfp4"
        assert family() == "mxfp8"
        with dfg.autocast(recipe=nvfp4):
            assert family() == "mxfp8"
        raise ZeroDivisionError
    assert type(dfg.Linear(H, H).weight) is torch.nn.Parameter
    with dfg.autocast(recipe=nvfp4):
        assert family() == "nvfp4"
        assert type(dfg.Linear(H, H).weight) is torch.nn.Parameter


def test_weights_are_made_by_the_names_of_the_modules():
    """The factory is asked for the weight slots alone, LayerNormMLP's by both of its names."""
    _ASKED.clear()
    recipe = emulated(recording)
    stored("linear", recipe, cls=make_module, name="a")
    stored("layernorm_mlp", recipe, cls=make_module, name="b")
    wanted = [dfg.QuantizerRole("linear", "weight", name) for name in ("a", "b.fc1", "b.fc2")]
    assert _ASKED == wanted


_ASKED = []


def recording(role):
    _ASKED.append(role)
    return factories.mxfp8_factory(role)


def test_marks_of_megatron_stay():
    with dfg.quantized_model_init(recipe=emulated(PLAIN["mxfp8"])):
        module = dfg.Linear(H, H, parallel_mode="column")
    assert module.weight.tensor_model_parallel and module.weight.partition_dim == 0


# Refusals.
def test_another_recipe_than_the_weights_is_refused():
    x, _ = data()
    module = stored("linear", emulated(PLAIN["mxfp8"]), cls=make_module)
    with dfg.autocast(recipe=emulated(PLAIN["nvfp4"])):
        with pytest.raises(ValueError, match="'demo.fc1' is stored with rowwise mxfp8.*wants nvfp"):
            module(x)
    columns = emulated(ALL["dequantized_columns"])
    plain = functools.partial(same_format_hybrid, factory=factories.current_scaling_factory)
    module = stored("linear", columns, cls=make_module)
    with dfg.autocast(recipe=emulated(plain)):
        with pytest.raises(ValueError, match="dequantized.*original.*accepted: a recipe whose"):
            module(x)
    with dfg.autocast(recipe=columns):
        module(x)


def test_a_dropped_plane_is_not_made_up():
    recipe, (x, _) = emulated(PLAIN["mxfp8"]), data()
    module = stored("linear", recipe, cls=make_module)
    with dfg.autocast(recipe=recipe):
        wanted = module(x)
        module.weight.update_usage(columnwise=False)
        with torch.no_grad():
            assert torch.equal(module(x), wanted)
        with pytest.raises(ValueError, match="holds no columnwise plane"):
            module(x)


@pytest.mark.parametrize("name", ["delayed", "delayed_children", "nvfp4_stochastic"])
@pytest.mark.parametrize("kind", KINDS)
def test_formats_with_state_or_dice_are_refused(kind, name):
    match = {"nvfp4_stochastic": "stochastic_rounding=False"}.get(name, "no amax to delay")
    with pytest.raises(ValueError, match=match):
        stored(kind, emulated(ALL[name]))


def test_experts_of_two_kinds_are_refused():
    def factory(role):
        is_first = role is not None and role.expert_index == 0
        return dfg.IdentityQuantizer() if is_first else factories.mxfp8_factory(role)

    with pytest.raises(ValueError, match="Identity.*accepted: one kind for all experts"):
        stored("grouped", emulated(factory))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"parameters_split": ("a_", "b_")}, "parameters_split=None"),
        ({"device": "meta"}, "device is meta"),
        ({"tp_size": 2, "parallel_mode": "row"}, "tp_size=2: its one scale"),
    ],
)
def test_layouts_are_refused(options, match):
    with dfg.quantized_model_init(recipe=emulated(PLAIN["current"])):
        with pytest.raises(ValueError, match=match):
            dfg.Linear(H, H, **options)


def test_arguments_are_checked():
    with pytest.raises(TypeError, match="recipe is 'mxfp8'; accepted: a CustomRecipe"):
        dfg.quantized_model_init(recipe="mxfp8")
    with pytest.raises(ValueError, match="recipe=None outside of any other"):
        with dfg.quantized_model_init():
            pass
