"""Sums with one bracketing, on one process and on several."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.conftest import free_port
from train.config import Parallel
from train.data.loader import Batch
from train.errors import UsageError
from train.parallel.ddp import DistributedEngine
from train.parallel.engine import Engine, LanePass
from train.parallel.lanes import Lanes, TreeSum, ordered_all_reduce, tree_sum

_server = multiprocessing.get_context("forkserver")  # which tests.conftest has prepared


def on_processes(work: Callable[..., Any], processes: int, folder: Path, *arguments: Any) -> list[Any]:
    """What `work(rank, processes, *arguments)` gives in each of some gloo processes."""
    port = free_port()
    started = [
        _server.Process(target=_process, args=(work, rank, processes, port, folder / f"{rank}.pt", arguments))
        for rank in range(processes)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(120)
        assert process.exitcode == 0
    return [torch.load(folder / f"{rank}.pt") for rank in range(processes)]


def _process(work: Callable[..., Any], rank: int, processes: int, port: int, file: Path, arguments: Sequence[Any]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(processes))
    dist.init_process_group("gloo")
    torch.save(work(rank, processes, *arguments), file)
    dist.barrier()
    dist.destroy_process_group()


def recursive(values: Sequence[Tensor]) -> Tensor:
    """The perfect binary tree as one draws it: the left half and the right half, each summed by itself."""
    if len(values) == 1:
        return values[0].clone()
    half = 1 << ((len(values) - 1).bit_length() - 1)
    return recursive(values[:half]) + recursive(values[half:])


def tricky(count: int, seed: int = 0, size: int = 257) -> list[Tensor]:
    """Values of so different sizes that each bracketing of their sum rounds to other bits."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) * 10 ** (4 * torch.rand(size, generator=generator)) for _ in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 7, 8, 16, 31, 32])
def test_a_tree_sum_is_the_perfect_binary_tree(count: int) -> None:
    values = tricky(count)
    assert torch.equal(tree_sum([value.clone() for value in values]), recursive(values))
    if count > 3:
        assert not torch.equal(recursive(values), sum(values[1:], values[0]))  # so these values tell bracketings apart


def test_the_bracketing_is_the_documented_one() -> None:
    # In float32 2^24 + 1 is 2^24, but 1 - 2^24 is exact. From the left the sum is 0, from the right 2, and in pairs 1.
    values = [torch.tensor([value]) for value in (2.0**24, 1.0, 1.0, -(2.0**24))]
    assert float(tree_sum(values)) == 1.0


def test_a_tree_sum_keeps_no_more_partial_sums_than_the_tree_is_deep() -> None:
    total = TreeSum()
    most = 0
    for value in tricky(63, size=1):
        total.push([value])
        most = max(most, sum(partial is not None for partial in total.partials))
    total.finish(tricky(1, size=1))
    assert most == 6  # log2 of 64 leaves
    assert total.partials == []


@pytest.mark.parametrize(("count", "processes"), [(1, 1), (6, 1), (5, 1), (4, 2), (4, 4), (6, 3), (12, 3), (8, 1)])
def test_processes_share_the_lanes_in_order(count: int, processes: int) -> None:
    found = [list(Lanes(count, rank, processes).local) for rank in range(processes)]
    assert list(itertools.chain.from_iterable(found)) == list(range(count))
    assert len({len(share) for share in found}) == 1


@pytest.mark.parametrize(("count", "processes"), [(6, 2), (12, 4), (12, 2), (5, 2), (2, 4), (1, 2)])
def test_lanes_that_would_change_the_bracketing_are_refused_with_what_fits(count: int, processes: int) -> None:
    with pytest.raises(UsageError) as refusal:
        Lanes(count, 0, processes)
    assert f"{count} lanes cannot be shared by {processes} processes" in str(refusal.value)
    said = re.search(r"run on ([\d, or]+) process", str(refusal.value))
    assert said
    numbers = [int(number) for number in re.findall(r"\d+", said[1])]
    assert len(numbers) == len(set(numbers))
    for number in numbers:
        Lanes(count, 0, number)


def _reduced(rank: int, processes: int, sizes: Sequence[int]) -> list[Tensor]:
    return [ordered_all_reduce(tricky(processes, seed=size, size=size)[rank].clone(), processes).clone() for size in sizes]


@pytest.mark.parametrize("processes", [2, 3, 4])
def test_an_ordered_all_reduce_is_the_same_tree_for_every_element(processes: int, tmp_path: Path) -> None:
    sizes = [1, 2, 3, 4, 5, 7, 64, 1001]  # also such as the processes do not divide
    results = on_processes(_reduced, processes, tmp_path, sizes)
    for place, size in enumerate(sizes):
        expected = recursive(tricky(processes, seed=size, size=size))
        assert all(torch.equal(result[place], expected) for result in results), size


class Bare:
    """What an engine needs of an Accelerator."""

    device = torch.device("cpu")

    def prepare_model(self, model: nn.Module, device_placement: bool = True, evaluation_mode: bool = False) -> nn.Module:
        return model if evaluation_mode else DistributedDataParallel(model, bucket_cap_mb=0.0001, broadcast_buffers=False)

    def backward(self, loss: Tensor, gradient: Tensor) -> None:
        torch.autograd.backward(loss, gradient)


class Outputs:
    """A task whose batches are what the model takes, with a loss of the outputs alone."""

    def __init__(self, loss: Callable[[Tensor], Tensor]) -> None:
        self.of = loss

    def inputs(self, batch: Any) -> Any:
        return batch

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return self.of(output)


def engine_of(model: nn.Module, loss: Callable[[Tensor], Tensor], lanes: Lanes) -> Engine:
    kind = Engine if lanes.processes == 1 else DistributedEngine
    return kind(model, cast(Any, Outputs(loss)), lanes, cast(Any, Bare()), Parallel(), Batch({}, []), strict=True)


def lane_pass(lane: int, inputs: Any, weight: int) -> LanePass:
    """A lane's part whose micro-batch is whatever the loss of the test takes."""
    return LanePass(lane, inputs, weight)


class Net(nn.Module):
    """Buffers of both kinds, and a layer large enough for DDP to make several buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.last(self.norm(self.first(inputs)))
        return scores


LANES = 8


def lane_inputs(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(5, 4, generator=generator) * 10 ** (2 * torch.rand(1, generator=generator)) for _ in range(LANES)]


def fresh() -> Net:
    torch.manual_seed(0)
    return Net()


def _stepped(rank: int, processes: int, steps: int = 3) -> dict[str, Tensor]:
    """Gradients of the last step and state after some steps of gradient descent, computed in lanes."""
    torch.set_num_threads(1)
    plain = fresh()
    lanes = Lanes(LANES, rank, processes)
    engine = engine_of(plain, lambda output: output.square().sum(), lanes)
    for step in range(steps):
        plain.zero_grad()
        inputs = lane_inputs(step)
        engine.forward_backward([lane_pass(lane, inputs[lane], 5) for lane in lanes.local], 1, seed=lambda lane: None)
        with torch.no_grad():
            for parameter in plain.parameters():
                assert parameter.grad is not None
                parameter -= 1e-6 * parameter.grad
    found = {f"grad {name}": parameter.grad for name, parameter in plain.named_parameters() if parameter.grad is not None}
    return {**found, **{name: value.clone() for name, value in plain.state_dict().items()}}


def by_hand(steps: int = 3) -> dict[str, Tensor]:
    """The same as the design tells it: each lane by itself from the step's start, and then the tree over all lanes."""
    torch.set_num_threads(1)
    model = fresh()
    gradients: dict[str, Tensor] = {}
    for step in range(steps):
        start = {name: value.clone() for name, value in model.state_dict().items()}
        lane_gradients, lane_states = [], []
        for inputs in lane_inputs(step):
            model.load_state_dict(start)
            model.zero_grad()
            model(inputs).square().sum().backward()
            lane_gradients.append({name: cast(Tensor, parameter.grad).clone() for name, parameter in model.named_parameters()})
            lane_states.append({name: value.clone() for name, value in model.state_dict().items()})
        gradients = {name: recursive([one[name] for one in lane_gradients]) for name in lane_gradients[0]}
        for name, value in model.state_dict().items():
            if name in gradients:
                value.copy_(start[name] - 1e-6 * gradients[name])
            elif value.is_floating_point():
                value.copy_(start[name] + recursive([one[name] - start[name] for one in lane_states]) / LANES)
            else:
                value.copy_(start[name] + 1)
    return {**{f"grad {name}": value for name, value in gradients.items()}, **model.state_dict()}


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_a_step_is_the_tree_over_its_lanes_to_the_last_bit(processes: int, tmp_path: Path) -> None:
    """Gradients, weights, running statistics (moved from the step's start by the lanes' mean move) and the count of batches."""
    results = [_stepped(0, 1)] if processes == 1 else on_processes(_stepped, processes, tmp_path)
    expected = by_hand()
    for result in results:
        assert result.keys() == expected.keys()
        different = [name for name, value in expected.items() if not torch.equal(result[name], value)]
        assert different == []


class Constants(nn.Module):
    """Buffers that no step changes, whose sums would overflow or round, beside ones that change in some lanes only."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.register_buffer("mask", torch.tensor([torch.finfo(torch.float32).min, -torch.inf, 0.0, -0.0]))
        self.register_buffer("table", torch.linspace(0, 1, 1000))
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, lane: int) -> Tensor:
        self.seen += lane
        self.count += 1
        return self.weight * lane


def _with_empty_lanes(rank: int, processes: int, count: int, empty: Sequence[int]) -> dict[str, Tensor]:
    plain = Constants()
    lanes = Lanes(count, rank, processes)
    engine = engine_of(plain, lambda output: output, lanes)
    passes = [lane_pass(lane, lane, 0 if lane in empty else 1) for lane in lanes.local]
    engine.forward_backward(passes, 1, seed=lambda lane: None)
    return {name: buffer.clone() for name, buffer in plain.named_buffers()}


@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.parametrize("empty", [[], [3], [0, 1], [2, 3]])
def test_buffers_that_no_lane_changes_keep_their_bits_and_counters_agree(
    processes: int, empty: list[int], tmp_path: Path
) -> None:
    results = (
        [_with_empty_lanes(0, 1, 4, empty)] if processes == 1 else on_processes(_with_empty_lanes, processes, tmp_path, 4, empty)
    )
    constant = dict(Constants().named_buffers())
    for result in results:
        for name in ("mask", "table"):
            assert result[name].numpy().tobytes() == constant[name].numpy().tobytes(), name
        assert result["count"] == 1
        assert result["seen"] == sum(lane for lane in range(4) if lane not in empty) / 4


def test_a_single_lane_without_weight_leaves_the_buffers_alone() -> None:
    assert all(not value.any() for name, value in _with_empty_lanes(0, 1, 1, [0]).items() if name in ("seen", "count"))
