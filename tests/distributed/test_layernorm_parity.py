"""LayerNormLinear and LayerNormMLP over a mesh equal one rank; broken reductions are noticed."""

from __future__ import annotations

import pytest

from tests.distributed.launch import run_ranks
from tests.distributed.layernorm_parity import refused_over_a_mesh, run_cases

TIMEOUT = 300


def assert_no_errors(reports, cases):
    for rank, report in enumerate(reports):
        assert report["cases"] == cases
        assert not report["errors"], f"rank {rank}:\n" + "\n".join(report["errors"])


def test_over_a_device_mesh():
    """DTensor parameters: norm gradients are whole without a trainer's help."""
    names = ["identity", "mxfp8"]
    assert_no_errors(run_ranks(run_cases, 2, names, "", True, timeout=TIMEOUT), 2 * 6)


@pytest.mark.parametrize(
    "mutation, recipe, over_mesh", [("amaxes", "current", False), ("norm gradients", "mxfp8", True)]
)
def test_a_broken_reduction_is_noticed(mutation, recipe, over_mesh):
    reports = run_ranks(run_cases, 2, [recipe], mutation, over_mesh, timeout=TIMEOUT)
    assert any(report["errors"] for report in reports)


def test_gate_over_a_device_mesh_is_refused():
    for message in run_ranks(refused_over_a_mesh, 2):
        assert message.startswith("activation='swiglu' with a tp_mesh of 2 ranks")
        assert "tp_group=mesh.get_group()" in message
