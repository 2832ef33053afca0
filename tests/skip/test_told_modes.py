"""What is said of inference mode names every module, as Python that does the same."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn

import egeria_cache
from egeria_cache.skip.model.frozen import FrozenPrefix, tell_modes


class Block(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.blocks = nn.ModuleList(Block() for _ in range(12))
        self.named = nn.ModuleDict({"a-b": Block(), "0": Block()})
        self.inner = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), Block())
        self.head = nn.Linear(4, 2)


FRONTS = {
    "all": (["stem", "norm", "blocks", "named", "inner"], "['norm', 'blocks', 'named', 'inner']"),
    "the first blocks": (["stem", "norm", "blocks.0", "blocks.1"], "['norm', 'blocks.0', 'bl"),
    "blocks in the middle": (["blocks.3", "blocks.4"], "['blocks.3', 'blocks.4']"),
    "names that are no identifiers": (["named.a-b", "named.0"], "['named.a-b', 'named.0']"),
    "a part of a sequence": (["inner.0"], "['inner.0']"),
    "nothing that differs": (["stem"], None),
}


@pytest.mark.modes
@pytest.mark.parametrize(("front", "written"), FRONTS.values(), ids=list(FRONTS))
def test_the_line_that_is_offered_holds_the_same_modules(front, written, caplog):
    plain = Model()
    model = copy.deepcopy(plain)
    held = FrozenPrefix([model.get_submodule(name) for name in front])
    with caplog.at_level(logging.WARNING, "egeria.modes"):
        assert tell_modes(model, held) == (written is not None)
    if written is None:
        assert not caplog.records
        return
    (text,) = caplog.messages
    assert written in text
    eval(text.partition("this line here: ")[2], {"egeria_cache": egeria_cache, "model": plain})
    rows = torch.randn(8, 4)
    for (name, ours), theirs in zip(model.named_modules(), plain.modules(), strict=True):
        if isinstance(ours, nn.BatchNorm1d | nn.Dropout):
            assert ours.training == theirs.training, name
            torch.manual_seed(0)
            expected = theirs(rows)
            torch.manual_seed(0)
            assert torch.equal(ours(rows), expected), name
