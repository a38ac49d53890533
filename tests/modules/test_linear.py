"""What a Linear computes: against torch.nn.Linear and FP64, for every format and layout."""

from __future__ import annotations

import copy
import functools

import pytest
import torch

import dist_finegrain as dfg
from dist_finegrain import factories
from tests.modules.linear_cases import assert_equal, make, run, sqnr_db
from tests.recipes import ALL, PLAIN, emulated, same_format_hybrid

STOCHASTIC = {"nvfp4", "nvfp4_1d", "nvfp4_stochastic", "guide", "mxfp8_fwd_nvfp4_bwd"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("how", ["disabled", "identity"])
def test_high_precision_equals_nn_linear_over_three_steps(dtype, how):
    ours = make(dtype=dtype)
    plain = torch.nn.Linear(96, 80, dtype=dtype)
    plain.load_state_dict(ours.state_dict())
    recipe = emulated(factories.high_precision_factory) if how == "identity" else None
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, plain)]
    for step in range(3):
        x, grad = torch.randn(24, 96, dtype=dtype), torch.randn(24, 80, dtype=dtype)
        got = run(ours, x, recipe, grad)
        plain.zero_grad()
        x.requires_grad_()
        y = plain(x)
        y.backward(grad)
        assert_equal(got[:3], (y.detach(), x.grad, plain.weight.grad))
        torch.testing.assert_close(got[3], plain.bias.grad, rtol=1e-2, atol=1e-2)
        plain.bias.grad.copy_(got[3])
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(ours.weight, plain.weight), step


@pytest.mark.parametrize("name", sorted(set(ALL) - {"guide"}))
def test_every_gemm_meets_the_sqnr_of_its_formats(name):
    """Y, dX, dW against FP64 of the unquantized matrices, for random normal data."""
    module = make(256, 192, bias=False, name="fc")
    x, grad = torch.randn(320, 256), torch.randn(320, 192)
    recipe = emulated(ALL[name])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    for _ in range(2):  # delayed scaling has its scales in the second step
        got = run(module, x, recipe, grad)
        optimizer.step()
    w, xd, gd = module.weight.double(), x.double(), grad.double()
    binding = next(iter(module._bindings.values()))
    for gemm, value, wanted in (
        ("fprop", got[0], xd @ w.t()),
        ("dgrad", got[1], gd @ w),
        ("wgrad", got[2], gd.t() @ xd),
    ):
        limit = gemm_limit_db(binding, gemm)
        assert sqnr_db(value, wanted) >= limit, (gemm, limit)


def gemm_limit_db(binding, gemm):
    """3 dB below the worse operand's cast."""
    from dist_finegrain.roles import LINEAR_GEMMS

    operands = next(g for g in LINEAR_GEMMS if g.gemm == gemm)
    formats = [
        binding.quantizers[slot].plane_format(direction)
        for slot, direction in (
            (operands.a, operands.a_direction),
            (operands.b, operands.b_direction),
        )
    ]
    return min([100, *(f.cast_sqnr_db for f in formats)]) - 3  # FP32 sums: over 100 dB


@pytest.mark.parametrize("name", sorted(PLAIN))
def test_same_format_as_plain_and_as_hybrid(name):
    """Bit-identical outputs and gradients (te-features item 19)."""
    x = torch.randn(64, 96)
    plain = run(make(name="fc"), x, emulated(PLAIN[name]))
    twice = functools.partial(same_format_hybrid, factory=PLAIN[name])
    assert_equal(run(make(name="fc"), x, emulated(twice)), plain)


def identity_columns(role, *, source):
    """What backward_override stands for, written as a factory."""
    if role is not None and role.tensor_type == "grad_output":
        return dfg.IdentityQuantizer()
    return dfg.HybridQuantizer(
        rowwise_quantizer=factories.mxfp8_factory(role),
        columnwise_quantizer=dfg.IdentityQuantizer(),
        columnwise_source=source,
    )


@pytest.mark.parametrize(
    "override, source",
    [("high_precision", "original"), ("dequantized", "rowwise_dequantized")],
)
def test_backward_override_is_identity_children(override, source):
    """Bit for bit (te-features item 36); the two overrides differ from one another."""
    x = torch.randn(64, 96)
    overridden = emulated(factories.mxfp8_factory, backward_override=override)
    written_out = emulated(functools.partial(identity_columns, source=source))
    got = run(make(), x, overridden)
    assert_equal(got, run(make(), x, written_out))
    exact = torch.ones(64, 80).t() @ x
    assert torch.equal(got[2], exact) == (override == "high_precision")
    with pytest.raises(ValueError, match="backward_override.*delayed"):
        run(make(), x, emulated(PLAIN["delayed"], backward_override=override))


@pytest.mark.parametrize("name", sorted(ALL))
@pytest.mark.parametrize("shape", [(1, 96), (0, 96), (7, 96), (2, 3, 96)])
def test_few_rows_none_and_three_dimensions(name, shape):
    """Bug case 3: (0, K) gives (0, N) and dW = 0; a normal batch afterwards is unaffected."""
    recipe, module = emulated(ALL[name]), make(bias=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    x = torch.randn(shape)
    y, dx, dw, _ = run(module, x, recipe)
    optimizer.step()
    assert y.shape == (*shape[:-1], 80) and dx.shape == shape
    if x.numel() == 0:
        assert dw.count_nonzero() == 0
        assert all(s.scale == 1 for s in module._delayed.values() if s.key[2] == "input")
    assert all(t.isfinite().all() for t in (y, dx, dw))
    module.eval()
    with torch.no_grad(), dfg.autocast(recipe=recipe):
        assert module(x).shape == y.shape
    if shape == (2, 3, 96) and name not in STOCHASTIC and not module._delayed:
        flat = run(module, x.reshape(6, 96), recipe)
        assert torch.equal(flat[0], y.reshape(6, 80)) and torch.equal(flat[2], dw)
    other = make(bias=False)
    if not module._delayed:
        batch = torch.randn(32, 96)
        with torch.no_grad(), dfg.autocast(recipe=recipe):
            assert torch.equal(module(batch), other(batch))


@pytest.mark.parametrize("name", sorted(ALL))
def test_any_memory_layout_gives_the_result_of_the_contiguous_copy(name):
    """Bug case 21: stride-0 gradients, column slices, transposed views."""
    recipe, x = emulated(ALL[name]), torch.randn(96, 96)
    module = make()
    wide = torch.randn(96, 200)
    layouts = {
        "expanded": torch.randn(1, 80).expand(96, 80),
        "scalar": torch.tensor(0.5).expand(96, 80),
        "slice": wide[:, 7:87],
        "transposed": torch.randn(80, 96).t(),
    }
    for grad in layouts.values():
        fresh, twin = copy.deepcopy(module), copy.deepcopy(module)
        strided = run(fresh, x.t().contiguous().t(), recipe, grad)
        assert_equal(strided, run(twin, x, recipe, grad.contiguous()))
    module.zero_grad()
    with dfg.autocast(recipe=recipe):
        module(x).sum().backward()
    assert module.weight.grad.isfinite().all()


@pytest.mark.parametrize("name", ["current", "delayed", "mxfp8", "nvfp4", "block", "row"])
def test_zero_blocks_and_lora_pair(name):
    """Bug case 5: zeros stay zeros, never NaN; a LoRA pair whose B is 0 trains."""
    recipe = emulated(PLAIN[name])
    module = make(64, 64, bias=False)
    y, dx, dw, _ = run(module, torch.zeros(64, 64), recipe)
    assert y.count_nonzero() == 0 and dw.count_nonzero() == 0 and dx.isfinite().all()
    down, up = make(64, 16, bias=False, name="a"), make(16, 64, bias=False, name="b")
    with torch.no_grad():
        up.weight.zero_()
    optimizer = torch.optim.SGD([*down.parameters(), *up.parameters()], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        with dfg.autocast(recipe=recipe):
            out = up(down(torch.randn(32, 64)))
        (out - 1).square().mean().backward()
        optimizer.step()
        assert up.weight.isfinite().all() and down.weight.isfinite().all()
    assert up.weight.count_nonzero() > 0


@pytest.mark.parametrize("name", sorted(PLAIN))
def test_fp16_is_scaled_in_fp32(name):
    """Bug case 8: FP16 values whose scale exceeds 65504; no Inf that plain FP16 does not give."""
    module = make(64, 64, dtype=torch.float16)
    with torch.no_grad():
        module.weight.fill_(2.0**-17)
    for value in (2.0**-17, 6e-8, 1.0):
        x = torch.full((32, 64), value, dtype=torch.float16)
        grad = torch.full((32, 64), 2.0**10 / 2**11, dtype=torch.float16)
        got = run(module, x, emulated(PLAIN[name]), grad)
        assert all(t.dtype == torch.float16 and t.isfinite().all() for t in got)


def test_gradient_elements_keep_their_type():
    """Bug case 11: E4M3 forward, E5M2 gradients; dX and dW have the norm of the exact ones."""
    module, x, grad = make(128, 128, bias=False), torch.randn(128, 128), torch.randn(128, 128)
    _, dx, dw, _ = run(module, x, emulated(factories.current_scaling_factory), grad)
    for got, wanted in ((dx, grad @ module.weight.detach()), (dw, grad.t() @ x)):
        assert got.norm() / wanted.norm() == pytest.approx(1, abs=0.05)
        assert sqnr_db(got, wanted) >= 20
