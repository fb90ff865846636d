"""The norm of all gradients together, with one bracketing wherever the rows of a gradient lie."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def rows(gradient: Tensor) -> Tensor:
    """The norm of each row, that is along all dimensions but the first, which sharding leaves whole."""
    matrix = gradient.flatten(1) if gradient.dim() > 1 else gradient.reshape(-1, 1)
    norms: Tensor = torch.linalg.vector_norm(matrix, dim=1)
    return norms


def norm_by_rows(gradients: Sequence[Tensor]) -> Tensor:
    return total([rows(gradient) for gradient in gradients])


def total(norms: Sequence[Tensor]) -> Tensor:
    """The norm of everything from the norms of the rows of each gradient."""
    norm: Tensor = torch.linalg.vector_norm(torch.cat([norm.to(norms[0].device) for norm in norms]))
    return norm
