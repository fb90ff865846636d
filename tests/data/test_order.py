"""Which sample stands where: claims about the pure order."""

from __future__ import annotations

import itertools
import time
from collections import Counter

import numpy as np
import pytest

from train.data.order import block_order, key, map_order, mix, permute, shard_order

MASK = 2**64 - 1


def test_mixing_gives_the_published_numbers_of_splitmix64() -> None:
    # The first outputs of the reference generator (Vigna's splitmix64.c) for the seed 1234567.
    states = [(1234567 + step * 0x9E3779B97F4A7C15) & MASK for step in range(5)]
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert [mix(state) for state in states] == expected
    assert mix(np.array(states, dtype=np.uint64)).tolist() == expected


@pytest.mark.parametrize("size", [*range(1, 34), 63, 64, 65, 255, 256, 257, 1000, 4097])
def test_a_permutation_has_each_place_once(size: int) -> None:
    for seed in (0, 2**64 - 1):
        assert np.array_equal(np.sort(permute(np.arange(size), size, seed)), np.arange(size))


def one_at_a_time(place: int, size: int, seed: int) -> int:
    """The same permutation as the papers tell it, in whole numbers: a Feistel network, walked until it is in the range."""
    bits = max(2, (max(size - 1, 1)).bit_length())
    half = (bits + 1) // 2
    value = place
    while True:
        left, right = divmod(value, 1 << half)
        for number in range(12):
            left, right = right, left ^ (mix(right ^ key(seed, number)) % (1 << half))
        value = (left << half) + right
        if value < size:
            return value


@pytest.mark.parametrize("size", [1, 2, 3, 5, 17, 64, 1000, 1_281_167])
def test_the_permutation_is_the_walked_feistel_network(size: int) -> None:
    places = np.unique(np.linspace(0, size - 1, 50).astype(np.int64))
    assert permute(places, size, 7).tolist() == [one_at_a_time(place, size, 7) for place in places.tolist()]


def chi_square(counts: list[int] | np.ndarray) -> float:
    expected = np.sum(counts) / len(counts)
    return float(np.sum((np.asarray(counts) - expected) ** 2) / expected)


def upper_bound(freedom: int) -> float:
    """What a chi-square of so many degrees of freedom passes once in about ten million tries (Wilson and Hilferty)."""
    return float(freedom * (1 - 2 / (9 * freedom) + 5.2 * np.sqrt(2 / (9 * freedom))) ** 3)


@pytest.mark.parametrize("size", [3, 4])
def test_all_orders_of_a_few_samples_are_equally_likely(size: int) -> None:
    orders = Counter(tuple(permute(np.arange(size), size, key(0, epoch)).tolist()) for epoch in range(1200))
    counts = [orders[order] for order in itertools.permutations(range(size))]
    assert sum(counts) == 1200
    assert chi_square(counts) < upper_bound(len(counts) - 1)


@pytest.mark.parametrize("size", [2, 5, 33])
def test_a_sample_comes_equally_often_at_every_place(size: int) -> None:
    orders = np.array([permute(np.arange(size), size, key(3, epoch)) for epoch in range(800)])
    for place in {0, size // 2, size - 1}:
        assert chi_square(np.bincount(orders[:, place], minlength=size)) < upper_bound(size - 1)


def test_neighbours_in_the_file_are_no_neighbours_in_the_order() -> None:
    order = permute(np.arange(10_000), 10_000, 0)
    distances = np.abs(np.diff(order))
    assert (distances == 1).sum() < 20  # 2 are expected
    assert 3200 < distances.mean() < 3470  # a third of the size, as of two independent places


def test_each_epoch_has_each_sample_once_in_an_order_of_its_own() -> None:
    epochs, keys = map_order(np.arange(60), 20, seed=0, shuffle=True)
    assert epochs.tolist() == [0] * 20 + [1] * 20 + [2] * 20
    orders = keys.reshape(3, 20).tolist()
    assert [sorted(order) for order in orders] == [list(range(20))] * 3
    assert len(set(map(tuple, orders))) == 3


def test_the_order_is_that_of_the_seed() -> None:
    first, same, other = (map_order(np.arange(40), 20, seed, shuffle=True)[1].tolist() for seed in (5, 5, 6))
    assert first == same != other


def test_without_a_shuffle_each_epoch_is_in_the_order_of_the_files() -> None:
    assert map_order(np.arange(8), 3, 0, shuffle=False)[1].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert shard_order(4, 3, 0, shuffle=False) == [0, 1, 2]
    assert block_order(4, 2, 3, 0, shuffle=False).tolist() == [0, 1, 2]


def test_shards_and_blocks_come_in_another_order_in_each_epoch_and_block() -> None:
    shards = [tuple(shard_order(epoch, 8, 0, shuffle=True)) for epoch in range(5)]
    blocks = [tuple(block_order(epoch, block, 8, 0, shuffle=True)) for epoch in range(5) for block in range(5)]
    assert len(set(shards)) == 5
    assert len(set(blocks)) == 25
    assert all(sorted(order) == list(range(8)) for order in [*shards, *blocks])


def test_a_sample_far_on_is_found_without_those_before() -> None:
    """Positions of the millionth epoch of ImageNet, alone and among others, at a cost that does not grow."""
    far = 10**6 * 1_281_167 + 12345
    alone = map_order(np.array([far]), 1_281_167, 0, shuffle=True)
    among = map_order(np.arange(far - 500, far + 500), 1_281_167, 0, shuffle=True)
    assert (alone[0][0], alone[1][0]) == (among[0][500], among[1][500]) == (10**6, among[1][500])
    seconds = {}
    for position in (100, 10**7, far):
        begun = time.perf_counter()
        for _ in range(20):
            map_order(np.arange(position, position + 1000), 1_281_167, 0, shuffle=True)
        seconds[position] = time.perf_counter() - begun
    assert max(seconds.values()) < 5 * min(seconds.values()), seconds


def test_keys_of_other_parts_or_another_order_are_others() -> None:
    parts = [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (2**64 - 1,), (1, 2, 3), (3, 2, 1)]
    assert len({key(*part) for part in parts}) == len(parts)
    many = np.array([key(0, epoch, sample) for epoch in range(20) for sample in range(100)], dtype=np.uint64)
    assert len(np.unique(many)) == many.size
    for bit in range(64):  # every bit is a fair coin: 5 standard deviations
        assert abs(int(((many >> np.uint64(bit)) & np.uint64(1)).sum()) - many.size / 2) < 5 * np.sqrt(many.size) / 2
