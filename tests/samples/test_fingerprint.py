"""A data set is told from another by all that decides its samples, and asked again in use."""

from __future__ import annotations

import contextvars
import functools
import io
import logging
import multiprocessing
import sys
import threading
import weakref
from collections import UserList
from dataclasses import dataclass
from operator import attrgetter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, default_collate

from egeria_cache.pystate import Portrait, Snapshot
from egeria_cache.samples import Draws, LoaderSource
from egeria_cache.samples.fingerprint import Fingerprint
from tests.helpers.forked import started

SCALE = 1.0


def source_of(dataset, collate=default_collate, **kwargs):
    settings = {"sample_id": None, "sample_version": None, "name": "t", "seed": 0}
    return LoaderSource(dataset, collate, **(settings | {"draws": Draws(0, 4)} | kwargs))


def print_of(dataset, collate=default_collate, **kwargs):
    source = source_of(dataset, collate, **kwargs)
    return str(source.fingerprint)


def numbered(offset=1, n=32):
    generator = torch.Generator().manual_seed(offset)
    return TensorDataset(torch.randn(n, 1, 4, 4, generator=generator), torch.arange(n))


class Labelled(Dataset):
    def __init__(self, label):
        self.label = label

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.label


class Scale:
    def __init__(self, by):
        self.by = by

    def __call__(self, x):
        return x * self.by


class Rare(Dataset):
    """What it is made with decides no sample that is sampled, so that only attributes tell."""

    def __init__(self, decides, n=1000):
        self.decides, self.n, self.num_loaded, self.opened = decides, n, 0, None

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        self.num_loaded += 1
        self.opened = self.opened or threading.Lock()
        return torch.tensor(float(index)) if index != 777 else self.seldom()

    def seldom(self):
        return self.decides


@dataclass
class Level:
    by: int = 1
    pad: int = 0

    def padded(self):
        return self.pad


LEVEL = Level()


@dataclass
class Collator:
    pad: int = 0

    def __call__(self, samples):
        return default_collate(samples)


def padded(samples, pad=0, *, side="left"):
    return default_collate(samples)


def closed(over):
    return lambda samples: default_collate(samples[: over + 9])


def reads_a_global(samples):
    return default_collate([SCALE * sample for sample in samples])


def edited(values, at, to):
    return [*values[:at], to, *values[at + 1 :]]


def other_pairs():
    files = [f"/data/{i:05}.png" for i in range(700)]
    many = ConcatDataset([Subset(numbered(1, 500), range(0, 400)), numbered(2, 300)])
    other = ConcatDataset([Subset(numbered(1, 500), edited(range(0, 400), 7, 9)), numbered(2, 300)])
    long = torch.arange(100_000)
    return {
        "dtypes": (Labelled(torch.zeros(2)), Labelled(torch.zeros(2, dtype=torch.int32))),
        "strings": (Labelled("a"), Labelled("b")),
        "kinds": (Labelled("1"), Labelled(1)),
        "content": (numbered(1), numbered(2)),
        "length": (numbered(1, 8), numbered(1, 16)),
        "indices inside": (many, other),
        "a transform's number": (Rare(Scale(0.5)), Rare(Scale(0.25))),
        "a partial": (Rare(functools.partial(max, 1)), Rare(functools.partial(max, 2))),
        "a bound method": (Rare(Scale(1).__call__), Rare(Scale(2).__call__)),
        "one file of a list": (Rare(files), Rare(edited(files, 351, "/data/other.png"))),
        "one element": (Rare(long), Rare(torch.where(long == 51_234, -1, long))),
        "one label of many": (
            Rare(np.zeros(300_000, np.int64)),
            Rare((np.arange(300_000) == 123_456).astype(np.int64)),
        ),
        "a dictionary": (Rare({"a": [1, {"b": 2}]}), Rare({"a": [1, {"b": 3}]})),
        "a list of another class": (Rare(UserList([1])), Rare(UserList([2]))),
        "a module": (Rare(torch.nn.LeakyReLU(0.1)), Rare(torch.nn.LeakyReLU(0.9))),
        "a lambda": (Rare(lambda x: x + 1), Rare(lambda x: x + 2)),
        "a shared number": (Rare(multiprocessing.Value("i", 1)), Rare(multiprocessing.Value("i"))),
    }


@pytest.mark.parametrize("kind", other_pairs())
def test_data_sets_that_differ_have_other_fingerprints(kind):
    one, other = other_pairs()[kind]
    again, _ = other_pairs()[kind]
    assert print_of(one) == print_of(again)
    assert print_of(one) != print_of(other)


def collate_pairs():
    return {
        "code": (lambda s: s[0], lambda s: s[1]),
        "defaults": (padded, _with(padded, __defaults__=(1,))),
        "keyword defaults": (padded, _with(padded, __kwdefaults__={"side": "right"})),
        "a partial": (functools.partial(padded, pad=1), functools.partial(padded, pad=2)),
        "a partial's place": (functools.partial(padded, pad=1), functools.partial(padded, side=1)),
        "a closure": (closed(1), closed(2)),
        "an object": (Collator(1), Collator(2)),
        "a method": (Collator(1).__call__, Collator(2).__call__),
    }


def _with(function, **attributes):
    twin = type(function)(function.__code__, function.__globals__, function.__name__)
    twin.__defaults__, twin.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    for name, value in attributes.items():
        setattr(twin, name, value)
    return twin


@pytest.mark.parametrize("kind", collate_pairs())
def test_collate_functions_that_differ_have_other_fingerprints(kind):
    one, other = collate_pairs()[kind]
    again, _ = collate_pairs()[kind]
    assert print_of(numbered(), one) == print_of(numbered(), again)
    assert print_of(numbered(), one) != print_of(numbered(), other)


def test_a_global_that_the_code_reads_counts(monkeypatch):
    before = print_of(numbered(), reads_a_global)
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 2.0)
    assert print_of(numbered(), reads_a_global) != before


def test_objects_without_bytes_are_never_taken_for_equal():
    data = Labelled(object())
    assert print_of(data) != print_of(data)


def test_counters_caches_and_files_that_loading_opens_do_not_count():
    fresh, used = Rare(1), Rare(1)
    used.num_loaded = 5
    assert print_of(fresh) == print_of(used)
    source = source_of(fresh)
    assert str(source.fingerprint)
    source.samples.load(task_of(source, range(10)))
    assert source.fingerprint.changed() is None


def task_of(source, indices):
    from egeria_cache.samples import Task

    return Task(0, list(indices), list(indices), [0] * len(indices), source.seed)


class OwnName(Rare):
    def __init__(self, name, **attributes):
        super().__init__(1)
        self._fingerprint = name
        self.__dict__.update(attributes)


def test_a_data_sets_own_fingerprint_stands_for_its_plain_attributes_but_not_for_code():
    long = torch.arange(10_000)
    assert print_of(OwnName("a")) != print_of(OwnName("b"))
    assert print_of(OwnName(long)) != print_of(OwnName(torch.where(long == 5_000, -1, long)))
    assert print_of(OwnName("a", files=["x"])) == print_of(OwnName("a", files=["y"]))
    assert print_of(OwnName("a", t=Scale(1))) != print_of(OwnName("a", t=Scale(2)))
    assert print_of(Subset(OwnName("a"), [1, 2])) != print_of(Subset(OwnName("b"), [1, 2]))


def test_what_refers_to_itself_or_cannot_be_read_ends():
    (ring := []).append(ring)
    odd = [ring, threading.Lock(), (i for i in range(3)), sys, object(), torch.Generator(), type]
    deep = functools.reduce(lambda inner, _: [inner, Scale(1)], range(100), [])
    assert print_of(Rare([*odd, deep])) == print_of(Rare([*odd, deep]))


CHANGES = {
    "a label in place, many": lambda d: d.many.__setitem__(2_345_678, 9),
    "a shuffle": lambda d: d.files.reverse(),
    "a file in memory": lambda d: d.text.write("more"),
    "what code names of an object": lambda d: setattr(LEVEL, "by", LEVEL.by + 1),
    "what a method of it names": lambda d: setattr(LEVEL, "pad", LEVEL.pad + 1),
    "what a method that is held names": lambda d: d.held.__self__.parts.append(1),
    "what a getter names": lambda d: d.got.append(1),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_in_mid_run_is_seen_and_the_name_is_another_one(kind, monkeypatch):
    class Changing(Rare):
        def seldom(self):
            return LEVEL.by + LEVEL.padded(), self.text, self.many, self.files, self.held()

        unnamed = lambda self: (self.parts, attrgetter("got")(self))  # noqa: E731

    data = Changing(Scale(1))
    data.text, data.many = io.StringIO(), np.zeros(3_000_000)
    data.held, data.parts, data.got = data.unnamed, [], []
    data.files = [f"{i}.png" for i in range(100_000)]
    source = source_of(data)
    before = str(source.fingerprint)
    # Long arrays are read again once a hundred times their cost has passed: let it have passed.
    assert source.fingerprint.changed() is None
    CHANGES[kind](data)
    # Long arrays are read again once a hundred times their cost has passed: let it have passed.
    monkeypatch.setattr(source.fingerprint, "_next_full", 0.0)
    assert source.fingerprint.changed()
    assert str(source.fingerprint) != before
    assert source.fingerprint.changed() is None


PARTS = {
    "__code__": (lambda by=3: 2 * by).__code__, "__defaults__": (3,), "__kwdefaults__": {"by": 3},
}  # fmt: skip


@pytest.mark.cases(3)
@pytest.mark.parametrize("part", PARTS)
def test_what_a_function_is_made_of_is_seen_in_mid_pass_at_a_glance(part):
    scale = (lambda *, by=2: by) if part == "__kwdefaults__" else (lambda by=2: by)
    source = source_of(Rare(scale))
    assert str(source.fingerprint)
    assert source.fingerprint._glance.is_whole
    assert source.fingerprint.changed(midway=True) is None
    setattr(scale, part, PARTS[part])
    assert source.fingerprint.changed(midway=True)


@pytest.mark.parametrize("midway", [False, True])
def test_what_has_moved_to_no_effect_is_asked_about_again_as_time_allows(midway):
    settings = SimpleNamespace(pad=0, calls=0)
    source = source_of([1, 2], lambda x: default_collate(x) * (sum(vars(settings).values()) > 5))
    fingerprint = source.fingerprint
    assert str(fingerprint)
    fingerprint._free_s = [1e9] * 3
    for settings.calls in range(1, 6):
        assert fingerprint.changed(midway=midway) is None
    settings.calls = 6
    assert "calls" in fingerprint.changed(midway=midway)


def training_within_reach():
    """Return a collate function that names what trains, and how that moves in training."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    trainer, log = SimpleNamespace(step=0, states={}, held=[model]), logging.getLogger("a test's")
    settings = SimpleNamespace(pad=0, calls=0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def collate(samples):
        return default_collate(samples)[0] + settings.pad, trainer, optimizer, log, model, scheduler

    def train():
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        scheduler.step()
        model.register_forward_hook(print).remove()
        trainer.step += 1
        trainer.states[torch.ones(3)] = "any"
        settings.calls += 1
        log.handlers.append(logging.NullHandler())

    return collate, train, settings


def test_what_trains_is_no_data_and_in_doubt_a_sample_decides(monkeypatch):
    collate, train, settings = training_within_reach()
    source = source_of(numbered(), lambda samples: collate(samples)[0])
    before = str(source.fingerprint)
    monkeypatch.setattr(Fingerprint, "_other_samples", lambda self: None)
    for _ in range(4):
        train()
        assert source.fingerprint.changed() is None
    settings.pad = 1
    assert "settings" in source.fingerprint.changed()
    assert str(source.fingerprint) != before
    assert str(source.fingerprint) == print_of(numbered(), lambda samples: collate(samples)[0])


def test_an_equal_list_in_another_place_is_no_change():
    data = Rare([f"{i}.png" for i in range(100_000)])
    source = source_of(data)
    before = str(source.fingerprint)
    data.decides = list(data.decides)
    assert source.fingerprint.changed() is None
    assert str(source.fingerprint) == before


def test_what_a_file_of_a_few_holds_is_seen_when_they_are_looked_at_next(monkeypatch, tmp_path):
    class Files(Dataset):
        def __len__(self):
            return 24

        def __getitem__(self, index):
            return (tmp_path / str(index)).read_text()

    for i in range(24):
        (tmp_path / str(i)).write_text(str(i))
    monkeypatch.setattr("egeria_cache.samples.fingerprint.FREE_S", 60.0)
    source = source_of(Files())
    assert str(source.fingerprint)
    (tmp_path / "13").write_text("another")
    assert source.fingerprint.changed() == "sample 13"


def test_another_process_finds_the_same_fingerprint():
    code = """
        import tests.samples.test_fingerprint as t
        print([t.print_of(pair[0]) for pair in t.other_pairs().values()])
        print([t.print_of(t.numbered(), pair[0]) for pair in t.collate_pairs().values()])
    """
    here = [print_of(pair[0]) for pair in other_pairs().values()]
    together = [print_of(numbered(), pair[0]) for pair in collate_pairs().values()]
    assert started(code).result() == f"{here}\n{together}\n"
    assert str(here).count("Rare[1000]") == 11


def kept():
    return SimpleNamespace(
        x=torch.zeros(3), rows=np.zeros(3), scale=1.0, deep=[[float(i), 0.5] for i in range(4)],
        labels=list(range(5)), inner=SimpleNamespace(by=1), kinds={1, 2},
        named={"a": torch.ones(2, dtype=torch.bfloat16)}, weight=torch.nn.Parameter(torch.ones(2)),
    )  # fmt: skip


WRITES = (
    lambda d: d.x.add_(1), lambda d: d.x.numpy().fill(3), lambda d: d.rows.fill(3),
    lambda d: setattr(d, "scale", 2.0), lambda d: d.deep[2].__setitem__(1, 7.0),
    lambda d: d.labels.__setitem__(0, 9), lambda d: setattr(d.inner, "by", 2),
    lambda d: setattr(d, "x", d.x.clone()), lambda d: d.labels.append(1),
    lambda d: d.kinds.add(7), lambda d: d.named.update(b=d.named.pop("a")),
    lambda d: d.named["a"].neg_(), lambda d: d.weight.data.fill_(2.0),
)  # fmt: skip


def many():
    return list(range(1000, 401_000))


def closed_over(by=1):
    def transform(x):
        return x * by

    def change(d):
        nonlocal by
        by = 2

    transform.change = change
    return transform


def tokenizer():
    tokenizers = pytest.importorskip("tokenizers")
    return tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "?": 1}, unk_token="?"))


TOO_LONG_OR_NO_PLACE = {
    "closure": (closed_over, lambda d: d.held.change(d)),
    "no number": (lambda: torch.full((3,), torch.nan), lambda d: d.held.fill_(0.0)),
    "tokenizer": (tokenizer, lambda d: d.held.add_tokens(["b"])),
    "table": (
        lambda: pytest.importorskip("pandas").DataFrame({"x": [1.0, 2.0], "word": ["a", "b"]}),
        lambda d: d.held.__setitem__("x", 3.0),
    ),
    "list": (many, lambda d: d.held.__setitem__(len(d.held) // 256 * 3, -1)),
    "list in a list": (lambda: [[i] for i in many()], lambda d: d.held[0].append(1)),
    "dict": (lambda: dict.fromkeys(many(), 1.0), lambda d: d.held.update({1000: 2.0})),
    "set": (lambda: set(many()), lambda d: d.held.add(-1)),
    "objects": (lambda: np.array(list("abcd"), object), lambda d: d.held.fill("e")),
    "array": (lambda: np.zeros(3 << 20), lambda d: d.held.fill(1)),
    "tensor": (lambda: torch.zeros(6 << 20), lambda d: d.held.fill_(1)),
    "made for inference": (
        torch.inference_mode()(lambda: torch.zeros(3)),
        lambda d: d.held.numpy().fill(1),
    ),
    "sparse": (lambda: torch.eye(3).to_sparse(), lambda d: d.held.mul_(2)),
    "subclass": (lambda: torch.zeros(3).as_subclass(OtherTensor), lambda d: d.held.fill_(1)),
    "context": (lambda: SETTING, lambda d: SETTING.set(3)),
    "weak reference": (lambda: weakref.ref(OtherTensor), lambda d: setattr(OtherTensor, "by", 3)),
}


class OtherTensor(torch.Tensor):
    by = 1


SETTING = contextvars.ContextVar("setting", default=1)


SEEN = {f"kept {n}": (kept, write) for n, write in enumerate(WRITES)} | {
    kind: (lambda make=make: SimpleNamespace(held=make()), write)
    for kind, (make, write) in TOO_LONG_OR_NO_PLACE.items()
}


@pytest.mark.cases(4)
@pytest.mark.parametrize(("make", "write"), SEEN.values(), ids=SEEN)
def test_a_glance_sees_what_was_written_or_replaced_kept_or_not(make, write):
    data = make()
    glance = Portrait({"data set": data}, thorough=False)
    assert not glance.has_moved()
    write(data)
    assert glance.has_moved()


def test_a_cell_of_a_table_counts_and_what_a_table_works_out_does_not():
    pandas = pytest.importorskip("pandas")

    def table(number=1, text="b"):
        return pandas.DataFrame({"n": [0, number], "t": ["a", text], "x": [0.5, 1.5]})

    one = Rare(table())
    assert len({print_of(Rare(table(*cell))) for cell in ((), (2,), (1, "c"))}) == 3
    before = Portrait({"data set": one})
    assert one.decides.n.sum() == 1  # a column is kept from then on
    assert not before.differences(Portrait({"data set": one}), set())


LEAF = st.integers() | st.text(max_size=3) | st.none() | st.builds(torch.rand, st.integers(0, 3))
HELD = st.recursive(
    LEAF, lambda part: st.lists(part) | st.dictionaries(st.text(max_size=2), part), max_leaves=20
)


@given(HELD)
@example(np.rec.array([(1.0, 2)] * 2, dtype=[("x", float), ("layout", int)]))
def test_a_quick_portrait_of_little_has_the_prints_of_a_thorough_one(held):
    quick = Portrait({"data set": SimpleNamespace(held=held)}, thorough=False)
    assert quick.prints == Portrait(quick.roots).prints


def test_one_object_in_the_place_of_another_is_seen():
    one, other = Scale(1), Scale(1)
    data = SimpleNamespace(all=[one, other], first=one, number=functools.lru_cache(len))
    before = Portrait({"data set": data}, thorough=False)
    assert not before.differences(Portrait({"data set": data}, thorough=False), set())
    data.first = other
    assert before.differences(Portrait({"data set": data}, thorough=False), set())


def test_a_generator_that_is_put_back_reads_as_it_did():
    kept = Snapshot([("", own := np.random.Generator(np.random.MT19937(5)))])
    own.random(), kept.put_back()
    assert not kept.has_moved()
