"""The small rooms under the skip: placeholders, rows, comparisons, guards."""

import copy
import pickle
from types import ModuleType

import pytest
import torch
from torch import nn

from egeria_cache.errors import BoundaryError
from egeria_cache.skip.serve.compare import difference, same_content, tolerance
from egeria_cache.skip.serve.cut import TensorSpec
from egeria_cache.skip.serve.placeholder import Escape, Placeholder, Scene, Source, Unavailable
from egeria_cache.skip.state.guards import ContentProbe, PrefixGuard
from egeria_cache.skip.state.watch import hook_of_training


@pytest.fixture
def stand():
    scene = Scene({}, frozenset())

    def make(*shape, dtype=torch.float32):
        meta = torch.empty(shape, dtype=dtype, device="meta")
        source = frozenset({Source("step", "stem", 0, 0)})
        return Placeholder.like(meta, torch.device("cpu"), source, scene)

    return make


def test_arithmetic_on_placeholders_is_arithmetic_on_shapes(stand):
    out = torch.cat([stand(4, 3) @ torch.randn(3, 5), torch.zeros(2, 5)]).to(torch.bfloat16)
    assert isinstance(out, Placeholder)
    assert (tuple(out.shape), out.dtype, out.device.type) == ((6, 5), torch.bfloat16, "cpu")
    assert {source.name for source in out.sources} == {"stem"}
    out.scene.finished = True


def test_what_depends_on_the_shape_alone_is_real(stand):
    for make in (torch.zeros_like, torch.ones_like, lambda p: p.new_full((2,), 7)):
        assert not isinstance(make(stand(4, 3)), Placeholder)
    assert torch.equal(torch.ones_like(stand(4, 3)), torch.ones(4, 3))


@pytest.mark.parametrize(
    "use",
    [
        lambda p: p.sum().item(), lambda p: bool(p.any()), lambda p: p.numpy(),
        lambda p: p.tolist(), lambda p: p.data_ptr(), lambda p: p.nonzero(), lambda p: p[p > 0],
        copy.deepcopy, pickle.dumps, lambda p: torch.zeros(4, 3).add_(p),
        lambda p: torch.zeros(4, 3).__setitem__(0, p[0]), lambda p: p.unsqueeze_(0),
        lambda p: __import__("numpy").asarray(p),
    ],
)  # fmt: skip
def test_whoever_needs_the_value_of_a_placeholder_is_stopped(stand, use):
    with pytest.raises(BoundaryError, match="stem"):
        use(stand(4, 3))


def test_an_unavailable_object_gives_no_attribute():
    gone = Unavailable.like(list)(frozenset({Source("step", "layer1")}))
    for use in (lambda: gone.key_cache, lambda: gone[0], lambda: len(gone), lambda: list(gone)):
        with pytest.raises(Escape, match="layer1"):
            use()


def permuted(*order):
    return lambda t: t.permute(order).contiguous().permute(*map(order.index, range(len(order))))


@pytest.mark.parametrize("num_per_sample", [1, 3])
@pytest.mark.parametrize("batch_dim", [0, 1, 2])
@pytest.mark.parametrize(
    "layout", [lambda t: t, permuted(0, 2, 1), permuted(2, 1, 0), permuted(1, 2, 0)]
)
def test_rows_come_back_with_the_values_and_strides_they_had(batch_dim, num_per_sample, layout):
    shape = [5, 6, 7]
    shapes = []
    for size in (4, 3):
        shape[batch_dim] = size * num_per_sample
        shapes.append(tuple(shape))
    a, b = (layout(torch.randn(s)) for s in shapes)
    spec = TensorSpec.of(a, 4, b, 3)
    assert spec is not None
    assert spec.batch_dim == batch_dim
    rows = spec.to_rows(a).contiguous()
    assert rows.shape[0] == 4
    assert tuple(rows.shape[1:]) == spec.row.shape
    back = spec.from_rows(rows)
    assert torch.equal(back, a)
    assert back.stride() == a.stride()
    for i in range(4):
        index = torch.arange(i * num_per_sample, (i + 1) * num_per_sample)
        torch.testing.assert_close(rows[i].sum(), a.index_select(batch_dim, index).sum())


def test_a_shape_that_follows_the_data_is_no_row():
    assert TensorSpec.of(torch.zeros(4, 4), 4, torch.zeros(3, 3), 3) is None
    assert TensorSpec.of(torch.zeros(5), 4, torch.zeros(3), 3) is None
    assert TensorSpec.of(torch.zeros(4), 4, torch.zeros(3, dtype=torch.int64), 3) is None


def test_the_batch_is_not_mistaken_for_another_dimension_of_its_size():
    spec = TensorSpec.of(torch.zeros(1, 4, 4), 4, torch.zeros(1, 4, 4), 3)
    assert spec is not None
    assert spec.batch_dim is None


def test_differences_are_relative_and_strict_where_they_must_be():
    a = torch.tensor([1.0, 1000.0])
    assert difference(a, a) == 0
    assert difference(a, a + 1e-3) == pytest.approx(1e-6, rel=0.1)
    assert difference(a, a[:1]) == float("inf")
    assert difference(a, torch.tensor([1.0, float("nan")])) == float("inf")
    nan = torch.tensor([1.0, float("nan"), float("inf")])
    assert difference(nan, nan.clone()) == 0
    assert difference(torch.tensor([1, 2]), torch.tensor([1, 3])) == float("inf")
    assert tolerance(torch.zeros(1, dtype=torch.int64)) == 0
    assert tolerance(torch.zeros(1, dtype=torch.bfloat16)) > tolerance(torch.zeros(1))


def test_objects_are_compared_by_what_they_hold():
    class Cache:
        def __init__(self, *layers):
            self.layers = list(layers)

    assert same_content(Cache(torch.ones(2), {"a": 1}), Cache(torch.ones(2), {"a": 1}))
    assert not same_content(Cache(torch.ones(2)), Cache(torch.zeros(2)))
    assert not same_content(Cache(torch.ones(2)), Cache())
    assert not same_content(1, 1.0)


def test_not_a_number_in_a_weight_is_no_change():
    assert PrefixGuard([("weight", None, torch.full((4,), float("nan")))]).changed() is None


# A look at elements that lie anywhere in memory finds each that is written to, and no other.

KINDS = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.complex64]


@pytest.mark.filterwarnings("ignore:torch.quantize")
@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_a_write_through_data_is_noticed_among_tensors_of_all_kinds(dtype):
    tensors = [torch.zeros(33, dtype=kind) for kind in KINDS for _ in range(3)]
    tensors.append(torch.quantize_per_tensor(torch.zeros(33), 0.1, 0, torch.qint8))
    ones = torch.ones(3)
    tensors.append(torch.quantize_per_channel(torch.zeros(3, 3), ones, 0 * ones, 0, torch.qint8))
    tensors += [conjugated := torch.zeros(3, dtype=torch.complex64).conj(), conjugated.imag]
    probe = ContentProbe(tensors)
    assert not probe.changed()
    tensors[3 * KINDS.index(dtype) + 1].data.fill_(1)
    assert probe.changed()


def test_a_single_element_is_seen_within_a_round_and_never_believed_to_be_as_before():
    weight = torch.zeros(256, 256)  # eight pieces
    probe = ContentProbe([weight])
    weight.numpy()[100, 7] = 1.0
    assert any(probe.changed() for _ in range(8))
    assert all(probe.whole_changed() for _ in range(9))
    weight.numpy()[100, 7] = 0.0
    assert not any(probe.changed() or probe.whole_changed() for _ in range(8))


def test_the_guard_sees_every_kind_of_change_by_name():
    def watch():
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval().requires_grad_(False)
        tensors = [
            (f"{name}.{key}", module, tensor)
            for name, module in model.named_modules()
            for key, tensor in (*module._parameters.items(), *module._buffers.items())
        ]
        return model, PrefixGuard(tensors, list(model.named_modules()))

    model, guard = watch()
    assert guard.changed() is None
    model[0].weight.add_(1)
    assert "'0.weight'" in guard.changed()
    guard = guard.anew()
    assert guard.changed() is None
    model[1].running_mean.data[0] += 1e-3  # moves no version counter
    assert "content" in guard.changed()
    model, guard = watch()
    model[0].weight.data = model[0].weight.data.clone()
    assert "'0.weight'" in guard.changed()
    for where, key, value in ("1.", "running_var", torch.zeros(4)), ("", "1", nn.BatchNorm1d(4)):
        model, guard = watch()
        setattr(model.get_submodule(where[:-1]), key, value)
        assert f"'{where}{key}'" in guard.changed()
    model, guard = watch()
    model[1].train()
    assert guard.changed() is None, "what is held is put back, whoever set it"


def test_a_library_that_a_hook_names_is_no_function_of_it():
    library, module = ModuleType("library"), nn.Linear(1, 1)
    library.__wrapped__ = lambda of: of.training
    module.register_forward_hook(lambda of, args, out: library.scaled(out))
    assert hook_of_training(module) is None
