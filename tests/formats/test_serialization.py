"""pickle, deepcopy and torch.save / torch.load(weights_only=True) of every kind of tensor."""

from __future__ import annotations

import copy
import io
import os
import pickle
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from dist_finegrain.formats.dtypes import DType
from dist_finegrain.formats.hybrid import HybridQuantizer
from dist_finegrain.formats.identity import IdentityQuantizer
from dist_finegrain.formats.plane import DIRECTIONS
from dist_finegrain.formats.quantizer import Quantizer
from dist_finegrain.formats.requests import DelayedScalingRequest, FP8Format

from .cases import EVERY, PLAIN, assert_same_tensor, sample
from .user_quantizers import Int8Quantizer, PassThrough

every = pytest.mark.parametrize("name", EVERY)
# A user registers his own class, by torch's own call.
torch.serialization.add_safe_globals([Int8Quantizer])


def saved(value) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer


def round_trips(value):
    yield pickle.loads(pickle.dumps(value))
    yield copy.deepcopy(value)
    yield torch.load(saved(value), weights_only=True)


@every
@pytest.mark.parametrize("dropped", [None, *DIRECTIONS])
def test_round_trips(name, dropped):
    x, other = sample(3, 16, 64), sample(3, 16, 64, seed=1)
    quantizer = EVERY[name]()
    if dropped:
        quantizer.set_usage(**{dropped: False})
    quantized, after = quantizer(x), quantizer(other)
    for twin in round_trips(quantized):
        assert_same_tensor(twin, quantized)
        assert twin._quantizer is not quantized._quantizer
        twin.copy_(other)  # with its own quantizer, into its own buffers
        assert_same_tensor(twin, after)
        assert_same_tensor(quantized, quantizer(x))


@every
def test_cleared_and_empty_tensors_round_trip(name):
    cleared, empty = EVERY[name]()(sample(4, 16)), EVERY[name]()(sample(0, 16))
    cleared.clear()
    for value in (cleared, empty):
        for twin in round_trips(value):
            assert_same_tensor(twin, value)


@every
def test_parameters_round_trip(name):
    parameter = torch.nn.Parameter(EVERY[name]()(sample(48, 64)))
    parameter.sequence_parallel = False
    for twin in round_trips(parameter):
        assert isinstance(twin, torch.nn.Parameter) and twin.requires_grad and twin.is_leaf
        assert twin.sequence_parallel is False
        assert_same_tensor(twin.detach(), parameter.detach())


@every
def test_state_dict_loads_exactly(name):
    """Quantized into quantized keeps every byte; values into quantized re-quantize."""
    module = torch.nn.Linear(64, 48, bias=False)
    module.weight = torch.nn.Parameter(EVERY[name]()(sample(48, 64)))
    fresh = copy.deepcopy(module)
    with torch.no_grad():
        fresh.weight.zero_()
    state = torch.load(saved(module.state_dict()), weights_only=True)
    address = fresh.weight.rowwise_plane.codes.data_ptr()
    fresh.load_state_dict(state)
    assert_same_tensor(fresh.weight.detach(), module.weight.detach())
    assert fresh.weight.rowwise_plane.codes.data_ptr() == address
    other = sample(48, 64, seed=1)
    fresh.load_state_dict({"weight": other})
    assert_same_tensor(fresh.weight.detach(), EVERY[name]()(other))
    plain = torch.nn.Linear(64, 48, bias=False)
    plain.load_state_dict(state)
    assert torch.equal(plain.weight, module.weight.dequantize().float())


def test_fresh_process_loads_weights_only(tmp_path):
    """One that imported dist_finegrain.formats, and the user's class, and nothing else."""
    tensors = {name: maker()(sample(48, 64)) for name, maker in EVERY.items()}
    values = {name: tensor.dequantize() for name, tensor in tensors.items()}
    path = tmp_path / "tensors.pt"
    torch.save((tensors, values), path)
    script = f"""
import torch, dist_finegrain.formats
try:
    torch.load({str(path)!r}, weights_only=True)
except Exception as error:
    assert "Int8Quantizer" in str(error), error
else:
    raise AssertionError("a class that was not registered was loaded")
from tests.formats.user_quantizers import Int8Quantizer
torch.serialization.add_safe_globals([Int8Quantizer])
tensors, values = torch.load({str(path)!r}, weights_only=True)
for name, tensor in tensors.items():
    assert torch.equal(tensor.dequantize(), values[name]), name
    tensor.copy_(torch.zeros(48, 64))
    assert not tensor.dequantize().any(), name
print(*map(repr, tensors.values()), sep="\\n")
"""
    assert run_fresh(script).splitlines() == [repr(tensor) for tensor in tensors.values()]


def run_fresh(script: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=environment
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout.strip()


def test_user_class_that_is_not_registered_is_named():
    with pytest.raises(pickle.UnpicklingError, match="PassThrough"):
        torch.load(saved(PassThrough()(sample(4, 16))), weights_only=True)


def test_forged_class_is_refused():
    function, (_, *rest) = IdentityQuantizer()(sample(4, 16)).__reduce_ex__(2)
    with pytest.raises(TypeError, match="names the class"):
        function(torch.nn.Linear, *rest)


@pytest.mark.parametrize("name", PLAIN)
def test_quantizers_round_trip(name):
    quantizer = PLAIN[name]()
    quantizer.set_usage(columnwise=False)
    for twin in round_trips(quantizer):
        assert type(twin) is type(quantizer) and twin is not quantizer
        assert (twin.rowwise_usage, twin.columnwise_usage) == (True, False)
        assert_same_tensor(twin(sample(48, 64)), quantizer(sample(48, 64)))


def test_values_that_a_quantizer_may_hold_are_registered():
    request = DelayedScalingRequest(fp8_format=FP8Format.E4M3)
    value = [DType.kFloat8E5M2, FP8Format.HYBRID, request, Int8Quantizer().plane_format("rowwise")]
    assert torch.load(saved(value), weights_only=True) == value


# Process groups.
@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def with_group(group) -> list[Quantizer]:
    plain = Int8Quantizer()
    plain.amax_reduction_group = group
    row, column = Int8Quantizer(), Int8Quantizer()
    row.amax_reduction_group = column.amax_reduction_group = group
    return [plain, HybridQuantizer(rowwise_quantizer=row, columnwise_quantizer=column)]


def groups_of(quantizer: Quantizer) -> list:
    if not isinstance(quantizer, HybridQuantizer):
        return [quantizer.amax_reduction_group]
    return [quantizer.child(d).amax_reduction_group for d in DIRECTIONS]


def test_process_group_is_shared_by_copies_and_never_saved(group):
    for quantizer in with_group(group):
        held = groups_of(quantizer)
        assert groups_of(quantizer.copy()) == groups_of(copy.copy(quantizer)) == held
        assert groups_of(copy.deepcopy(quantizer)) == held
        nothing = [None] * len(held)
        assert groups_of(pickle.loads(pickle.dumps(quantizer))) == nothing
        quantized = quantizer(sample(48, 64))
        assert groups_of(quantized._quantizer) == nothing
        for twin in round_trips(quantized):
            assert groups_of(twin._quantizer) == nothing
            assert_same_tensor(twin, quantized)
        assert groups_of(quantizer) == held


def test_deepcopy_of_a_quantizer_copies_its_state():
    quantizer = Int8Quantizer()
    quantizer.scale = torch.ones(1)
    copy.deepcopy(quantizer).scale.add_(1)
    assert torch.equal(quantizer.scale, torch.ones(1))
