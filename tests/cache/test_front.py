"""A frozen front of its own: served as in a whole model, beside blocks of other ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from egeria_cache import BoundaryError, EgeriaLoader, FrozenFront
from egeria_cache.samples.fingerprint import NUM_AGAIN

NUM = 24


class Numbers(Dataset[tuple[Tensor, int]]):
    """Counts what is loaded."""

    def __init__(self) -> None:
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.loaded.append(index)
        return torch.linspace(-1, 1, 6) * index, index


def make_blocks(num_here: int) -> list[nn.Sequential]:
    """Four blocks; those behind the first `num_here` lie on another rank."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)]
    return [block if i < num_here else block.to("meta") for i, block in enumerate(blocks)]


def freeze(front: FrozenFront, blocks: list[nn.Sequential], depth: int) -> None:
    for index, block in enumerate(blocks):
        block.requires_grad_(index >= depth)
    front.freeze(depth)


@pytest.mark.parametrize("num_here", [2, 4])
def test_rows_are_those_of_the_blocks_and_are_computed_once(directory: Path, num_here: int) -> None:
    blocks, data = make_blocks(num_here), Numbers()
    front = FrozenFront(blocks, directory)
    assert front.cache is not None
    loader = EgeriaLoader(data, 6, shuffle=True, cache=front.cache, reuse=None)
    expected = torch.stack([torch.linspace(-1, 1, 6) * i for i in range(NUM)])
    # What was stored at the first boundary is where the second one's rows are computed from.
    for depth, hits, most_loaded in [
        (0, 0, NUM), (1, 0, 4 * NUM), (1, NUM, 0), (2, NUM - 6, 11), (2, NUM, 0), (0, 0, NUM),
    ]:  # fmt: skip
        freeze(front, blocks, depth)
        with torch.no_grad():
            wanted = nn.Sequential(*blocks[:depth])(expected)
        front.cache.flush()
        before, data.loaded[:] = front.cache.stats(), []
        for rows, targets in loader:
            output, numbers = front.plain(front(rows)), front.plain(targets)
            assert type(output) is Tensor
            assert type(numbers) is Tensor
            torch.testing.assert_close(output, wanted[numbers], rtol=1e-6, atol=1e-6)
        after = front.cache.stats()
        assert after.hits - before.hits == hits
        # How many audits and looks at the data set, where a pass begins and where it ends, there
        # are depends on the time they take.
        assert len(data.loaded) <= most_loaded + after.audited - before.audited + 2 * NUM_AGAIN
    front.close()


def test_without_a_directory_it_only_computes() -> None:
    blocks = make_blocks(2)
    front = FrozenFront(blocks)
    freeze(front, blocks, 2)
    rows = torch.randn(3, 6)
    assert torch.equal(front.plain(front(rows)), blocks[1](blocks[0](rows)))
    assert not front.plain(front(rows)).requires_grad


def test_several_tensors_go_from_block_to_block() -> None:
    class Two(nn.Module):
        def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
            return left + 1, right * 2

    front = FrozenFront([Two(), Two(), Two()])
    front.freeze(2)
    left, right = front(torch.zeros(2), torch.ones(2))
    assert left.tolist() == [2, 2]
    assert right.tolist() == [4, 4]


def test_what_cannot_be_a_front_is_refused_by_name() -> None:
    blocks = make_blocks(2)
    front = FrozenFront(blocks)
    with pytest.raises(BoundaryError, match=r"'0\.0\.weight' .* is trainable"):
        front.freeze(1)
    for block in blocks:
        block.requires_grad_(False)
    with pytest.raises(BoundaryError, match=r"'2\.0\.weight' .* is not on this rank"):
        front.freeze(3)
    with pytest.raises(ValueError, match=r"depth must be in \[0, 4\], got 5"):
        front.freeze(5)
    assert front.depth == 0
