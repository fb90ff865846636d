"""The gradient's norm is the norm, and has the same bits wherever its rows lie."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from train.parallel.norm import norm_by_rows, rows, total


def gradients() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes: list[tuple[int, ...]] = [(13, 3, 3, 3), (13,), (1,), (), (7, 130), (64, 1)]
    return [torch.randn(shape, generator=generator) * 10.0**place for place, shape in enumerate(shapes)]


def test_it_is_the_norm_of_all_numbers() -> None:
    whole = nn.utils.get_total_norm([gradient.double() for gradient in gradients()])
    assert float(norm_by_rows(gradients())) == pytest.approx(float(whole), rel=1e-6)


@pytest.mark.parametrize("processes", [2, 4, 16])
def test_cut_by_rows_it_has_the_same_bits(processes: int) -> None:
    """Also where there are more processes than rows, and a channels-last layout."""
    cut = [torch.cat([rows(part) for part in gradient.tensor_split(processes)]) for gradient in gradients() if gradient.dim()]
    whole = [gradient for gradient in gradients() if gradient.dim()]
    assert torch.equal(total(cut), norm_by_rows(whole))
    whole[0] = whole[0].contiguous(memory_format=torch.channels_last)
    assert torch.equal(total(cut), norm_by_rows(whole))
