"""torch.compile: one graph where formats keep no state, the eager bits everywhere (bug case 37)."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch._dynamo.testing

import dist_finegrain as dfg
from dist_finegrain import factories
from tests.recipes import ALL, emulated

K, N = 64, 96
STATELESS = sorted(name for name in ALL if "delayed" not in name)
MODULES = {
    "Linear": lambda **o: dfg.Linear(K, N, name="demo.fc1", **o),
    "LayerNormLinear": lambda **o: dfg.LayerNormLinear(K, N, name="demo.fc1", **o),
    "RMSNorm": lambda **o: dfg.LayerNormLinear(
        K, N, normalization="RMSNorm", bias=False, return_layernorm_output=True, **o
    ),
    "LayerNormMLP": lambda **o: dfg.LayerNormMLP(K, N, activation="relu", name="demo.mlp", **o),
}


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def two_linears():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        dfg.Linear(K, N, name="demo.fc1"), torch.nn.ReLU(), dfg.Linear(N, K, name="demo.fc2")
    )


def step(function, module, x, recipe):
    """Outputs, dX and all parameters' gradients of one forward and backward."""
    module.zero_grad()
    x = x.detach().clone().requires_grad_()
    with dfg.autocast(enabled=recipe is not None, recipe=recipe):
        y = function(x)
    outputs = y if isinstance(y, tuple) else (y,)
    sum((o.float() * torch.arange(o.shape[-1])).sum() for o in outputs if o is not None).backward()
    results = [*outputs, x.grad, *(p.grad for p in module.parameters())]
    return [None if r is None else r.detach() for r in results]


def assert_same_bits(got, wanted):
    for a, b in zip(got, wanted, strict=True):
        assert (a is None) == (b is None)
        assert a is None or (a.dtype == b.dtype and torch.equal(a, b))


def check(function, module, x, recipe):
    assert_same_bits(step(function, module, x, recipe), step(module, module, x, recipe))


@pytest.mark.parametrize("name", STATELESS)
def test_two_linears_are_one_graph_with_the_eager_bits(name):
    """eval, train, eval, train; then 48 rows instead of 32."""
    module, recipe = two_linears(), emulated(ALL[name])
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for rows in (32, 48):
        for training in (False, True, False, True):
            module.train(training)
            check(compiled, module, torch.randn(rows, K), recipe)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", sorted(MODULES))
def test_every_module_is_one_graph(name, dtype):
    torch.manual_seed(0)
    module = MODULES[name](params_dtype=dtype)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for recipe in (emulated(ALL["guide"]), emulated(ALL["nvfp4_stochastic"]), None):
        for leading in ((32,), (4, 8)):
            check(compiled, module, torch.randn(*leading, K).to(dtype), recipe)


def test_frozen_weights_no_grad_and_torch_autocast():
    module, recipe = two_linears(), emulated(ALL["block"])
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    module[0].weight.requires_grad_(False)
    module[2].bias.requires_grad_(False)
    check(compiled, module, torch.randn(32, K), recipe)
    with torch.autocast("cpu", torch.bfloat16):
        check(compiled, module, torch.randn(32, K), recipe)
    with torch.no_grad(), dfg.autocast(recipe=recipe):
        x = torch.randn(32, K)
        assert torch.equal(compiled(x), module(x))


def test_another_recipe_another_module_and_copies_are_noticed():
    counter = torch._dynamo.testing.CompileCounter()
    module, x = two_linears(), torch.randn(32, K)
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    results = []
    for name in ("mxfp8", "nvfp4", "mxfp8"):
        with dfg.autocast(recipe=emulated(ALL[name])):
            results.append(compiled(x))
            assert torch.equal(results[-1], module(x)), name
    assert torch.equal(results[0], results[2]) and not torch.equal(results[0], results[1])
    assert counter.frame_count == 2
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        with torch.no_grad():
            twin[0].weight.mul_(2)
        check(
            torch.compile(twin, fullgraph=True, backend="aot_eager"),
            twin,
            x,
            emulated(ALL["mxfp8"]),
        )


def test_an_invalidated_recipe_asks_its_factory_again():
    answers = {"factory": factories.mxfp8_factory}
    recipe = emulated(lambda role: answers["factory"](role))
    module, x = two_linears(), torch.randn(32, K)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    check(compiled, module, x, recipe)
    answers["factory"] = ALL["block"]
    recipe.invalidate()
    check(compiled, module, x, recipe)


def test_steps_end_between_calls():
    """Stochastic rounding draws the noise of the step in which the graph runs."""
    module, recipe = two_linears(), emulated(ALL["nvfp4_stochastic"])
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x, results = torch.randn(32, K), []
    for _ in range(2):
        check(compiled, module, x, recipe)
        results.append(step(compiled, module, x, recipe)[0])
        dfg.end_step()
    assert not torch.equal(*results)


def test_checkpoint_inside_of_the_graph():
    module, recipe = two_linears(), emulated(ALL["guide"])

    def function(x):
        return torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False)

    check(
        torch.compile(function, fullgraph=True, backend="aot_eager"),
        module,
        torch.randn(32, K),
        recipe,
    )


EAGER = {
    "delayed scaling": (lambda: MODULES["Linear"](), ALL["delayed"], {}),
    "is_first_microbatch": (
        lambda: MODULES["LayerNormMLP"](), ALL["mxfp8"], {"is_first_microbatch": True}
    ),
    "save_original_input": (
        lambda: MODULES["Linear"](save_original_input=True), ALL["mxfp8"], {}
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", sorted(EAGER))
def test_what_keeps_state_runs_as_without_torch_compile(case):
    """A graph break, an error with fullgraph=True; never other bits."""
    make, factory, options = EAGER[case]
    torch.manual_seed(0)
    module, recipe, x = make(), emulated(factory), torch.randn(32, K)

    def function(x):
        return module(x * 1.0, **options)

    compiled = torch.compile(function, backend="aot_eager")
    twin = copy.deepcopy(module)
    for _ in range(2):
        got = step(compiled, module, x, recipe)
        assert_same_bits(got, step(lambda x: twin(x * 1.0, **options), twin, x, recipe))
        dfg.end_step()
    reason = {"save_original_input": "keep tensors that the graph does not see"}.get(case, case)
    unsupported = pytest.raises(torch._dynamo.exc.Unsupported, match=reason)
    with unsupported, dfg.autocast(recipe=recipe):
        torch.compile(function, fullgraph=True, backend="aot_eager")(x)


def test_autocast_inside_of_the_function_breaks_the_graph():
    module, recipe = two_linears(), emulated(ALL["mxfp8"])

    def function(x):
        with dfg.autocast(recipe=recipe):
            return module(x)

    x = torch.randn(32, K)
    compiled = torch.compile(function, backend="aot_eager")
    assert torch.equal(compiled(x), function(x))


def test_grouped_linear_breaks_the_graph():
    torch.manual_seed(0)
    module, recipe = dfg.GroupedLinear(2, K, N, name="demo.experts"), emulated(ALL["mxfp8"])

    def function(x):
        return module(torch.relu(x), [16, 16])

    check(
        torch.compile(function, backend="aot_eager"),
        _WithParameters(module, function),
        torch.randn(32, K),
        recipe,
    )


class _WithParameters:
    """A function of x with a module's parameters."""

    def __init__(self, module, function):
        self.parameters, self.zero_grad, self.function = (
            module.parameters,
            module.zero_grad,
            function,
        )

    def __call__(self, x):
        return self.function(x)


def test_a_graph_keeps_no_parameter_alive():
    module, recipe = two_linears(), emulated(ALL["mxfp8"])
    check(torch.compile(module, backend="aot_eager"), module, torch.randn(32, K), recipe)
    weights = [weakref.ref(parameter) for parameter in module.parameters()]
    del module
    torch._dynamo.reset()
    gc.collect()
    assert all(weight() is None for weight in weights)


@pytest.mark.nightly
@pytest.mark.slow
def test_with_inductor():
    module, recipe = two_linears(), emulated(ALL["guide"])
    check(torch.compile(module, fullgraph=True), module, torch.randn(32, K), recipe)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["current", "block", "mxfp8", "nvfp4_stochastic"])
def test_on_a_gpu(name):
    """Natively where there is a kernel."""
    torch.manual_seed(0)
    module = two_linears().cuda().bfloat16()
    recipe = dfg.CustomRecipe(ALL[name], execution="emulate")
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x = torch.randn(32, K, device="cuda").bfloat16()
    with torch.device("cuda"):
        check(compiled, module, x, recipe)
