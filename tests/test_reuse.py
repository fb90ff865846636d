"""A large batch is put where one was that nothing needs any more."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from train.determinism import KEPT
from train.reuse import Reused

LARGE = torch.Size((KEPT // 4 // 64, 4, 4, 4))
CPU = torch.device("cpu")


@pytest.fixture
def made() -> Reused:
    return Reused()


def empty(made: Reused, shape: torch.Size = LARGE, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
    return made.empty(shape, CPU, memory_format)


def test_memory_that_nothing_holds_is_used_again(made: Reused) -> None:
    first = empty(made)
    where = first.data_ptr()
    del first
    assert empty(made).data_ptr() == where


def test_memory_that_a_view_holds_is_not(made: Reused) -> None:
    view = empty(made).fill_(1)[3]
    empty(made).fill_(2)
    assert torch.all(view == 1)


def test_memory_that_a_backward_pass_needs_is_not(made: Reused) -> None:
    """The gradient of a sum of products with a weight is the sum of the values, as they were."""
    weight = torch.ones(1, requires_grad=True)
    product = (empty(made).fill_(1) * weight).sum()
    empty(made).fill_(2)
    product.backward()
    assert weight.grad is not None
    assert weight.grad.item() == LARGE.numel()


def test_sizes_may_follow_each_other(made: Reused) -> None:
    for more in (0, 1, 0, 2):
        shape = torch.Size((LARGE[0] + more, *LARGE[1:]))
        assert empty(made, shape).shape == shape


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("shape", [LARGE, torch.Size((2, 3, 4, 5))], ids=["large", "small"])
def test_tensors_lie_as_torch_lays_them(made: Reused, memory_format: torch.memory_format, shape: torch.Size) -> None:
    assert empty(made, shape, memory_format).stride() == torch.empty(shape, memory_format=memory_format).stride()


def test_a_traced_step_takes_no_memory(made: Reused) -> None:
    with FakeTensorMode():
        assert isinstance(empty(made), FakeTensor)
    assert not isinstance(empty(made), FakeTensor)
