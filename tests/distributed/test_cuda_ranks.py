"""Two ranks on one GPU, over gloo: tensor and sequence parallelism with the CUDA kernels."""

from __future__ import annotations

import pytest

from tests.distributed.cuda_parity import run_cases, zoo
from tests.distributed.launch import run_ranks
from tests.recipes import ALL


def assert_parity(device: str, recipes: list[str], timeout: float) -> None:
    for rank, report in enumerate(run_ranks(run_cases, 2, device, recipes, timeout=timeout)):
        assert not report["unavailable"]
        assert report["cases"] == len(recipes) * 4
        assert not report["errors"], f"rank {rank}:\n" + "\n".join(report["errors"])


@pytest.mark.gpu
def test_every_recipe_on_one_gpu_with_its_kernels():
    """The zoo, the plain formats and the hybrids of the other tests."""
    assert len(zoo()) >= 8
    assert_parity("cuda", sorted({**ALL, **zoo()}), 110)


@pytest.mark.slow
def test_recipes_of_the_zoo_alone_on_the_cpu():
    """Those that no other parity test runs."""
    assert_parity("cpu", sorted(set(zoo()) - set(ALL)), 300)
