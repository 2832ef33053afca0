"""One gate for all that happens beside the loop: where it fails, training does not notice."""

import copy
import functools
import gc
import importlib
import signal
import tempfile
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch import nn
from torch.utils.data import default_collate

from egeria_cache import ActivationCache, BoundaryError, EgeriaLoader
from egeria_cache.attempt import Attempt, is_ours
from tests.helpers.steps import take_step
from tests.hostile.harness import Run, cross_entropy, first_difference, sgd
from tests.hostile.nets import Net, rows

PLACES = {
    "batch.batch.Batch": "rows_of",
    "batch.tensor": "operation",
    "cache.engine_callbacks.EngineCallbacks": "audit_leaves captured cut_found note",
    "cache.loader_api.LoaderApi": "adopt begins log_epoch next_pass_of note_step "
    "wants_control yields",
    "gate.policy": "AuditPlan.choose Counters.model_called",
    "loader.assembly.Assembly": "_batch",
    "batch": "is_faithful",
    "loader.plan.Planner": "_plans",
    "prefetch.prefetcher.PlannedEntry": "load ready",
    "prefetch.prefetcher.Prefetcher": "start",
    "prefetch.view.View": "contains",
    "samples.fingerprint.Fingerprint": "changed _take",
    "samples.fingerprint": "Portrait",
    "samples.source.LoaderSource": "draws_at identify why_not_cacheable look_at",
    "samples.collation.Study": "alone look_for_padding",
    "skip.engine": "address prefix_tensors reached tell_modes",
    "skip.prove.dry_run.AutoBoundary": "follow _computes_features",
    "skip.prove.probe.Prober": "run",
    "skip.prove.dry_run.DryRun": "discover run",
    "skip.prove.dry_run": "prove",
    "skip.serve.plan.PlanCache": "find",
    "skip.serve.call.Invocation": "key of",
    "skip.serve.replay": "prefix replay",
    "skip.serve.plan.ReplayPlan": "rows",
    "skip.engine.SkipEngine": "_look _compare",
    "skip.state.guards": "tensor_digest",
    "skip.state.guards.PrefixGuard": "changed",
    "skip.state.surroundings.Surroundings": "now",
    "store.generation.Generation": "put_batch",
    "store.store.ActivationStore": "open_generation",
}
CASES = [f"{where}.{name}" for where, names in PLACES.items() for name in names.split()]


class Provoked(Exception):  # noqa: N818
    """Raised where something is done beside the loop."""


OURS = {"__name__": "egeria_cache.provoked"}
exec("def fail(error):\n    raise error", OURS)  # errors of code of ours


def provoked(monkeypatch, place, after):
    """Let a function raise from its n-th call on."""
    parts, owner = place.split("."), None
    for end in range(len(parts) - 1, 0, -1):
        try:
            owner = importlib.import_module("egeria_cache." + ".".join(parts[:end]))
            break
        except ModuleNotFoundError:
            continue
    *inner, name = parts[end:]
    owner = functools.reduce(getattr, inner, owner)
    found, calls = vars(owner)[name], [0]
    original = found.__func__ if isinstance(found, classmethod) else found

    @functools.wraps(original)
    def raising(*args, **kwargs):
        calls[0] += 1
        if calls[0] > after:
            OURS["fail"](Provoked)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, classmethod(raising) if original is not found else raising)
    return calls


def own_collate(samples):
    return default_collate(samples)


def train(run, boundary):
    model = run.freeze(Net(), None if run.is_plain else boundary, ("early", "middle"))
    loader = run.loader(rows(), collate_fn=own_collate, shuffle=True)
    optimizer = sgd(model)
    for _ in range(4):
        for x, y in loader:
            run.step(cross_entropy(model, (x.float() * 2.0, y)), optimizer)
    run.see(model)


def traces(script, place, after):
    """Return the traces of a plain run, and of one that is served and audited where it can be."""
    found = []
    for way in ("plain", "audited"):
        with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
            calls = provoked(patch, place, after) if way != "plain" else [0]
            found.append(Run(way, Path(directory) / "cache").run(script))
    return *found, calls[0]


@pytest.mark.cases(2 * len(CASES))
@pytest.mark.parametrize("place", CASES)
@pytest.mark.parametrize("after", [0, 5])
def test_whatever_fails_beside_the_loop_the_training_is_the_same(place, after):
    boundary = "auto" if "Auto" in place else "middle"
    script = functools.partial(train, boundary=boundary)
    plain, cached, num_calls = traces(script, place, after)
    assert num_calls, "it is never called"
    if isinstance(cached.error, BoundaryError) and not cached.calls:
        return  # a boundary at which nothing can be proved is refused by name, at the first call
    assert plain.error is None
    assert cached.error is None
    assert first_difference(plain, cached) is None
    if num_calls > after:
        assert len(cached.words) <= 1, cached.words


class Ringing(nn.Module):
    """A layer in which a signal comes whenever it is not itself that runs, but a copy."""

    real = 0

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 8)
        Ringing.real = id(self)

    def forward(self, x):
        if id(self) != Ringing.real:
            signal.raise_signal(signal.SIGALRM)
        return self.inner(x)


def out_of_time(number, frame):
    raise Provoked("time is over")


class Alarm:
    def raised(self, number, frame):
        raise Provoked("time is over")

    def __call__(self, number, frame):
        raise Provoked("time is over")


@pytest.mark.parametrize(
    "handler", [out_of_time, Alarm().raised, Alarm(), functools.partial(out_of_time)]
)
def test_what_a_signal_raises_reaches_the_loop_unchanged_and_no_proof_is_tried_again(
    directory, handler
):
    model = nn.Sequential(Ringing(), nn.Linear(8, 3))
    model[0].requires_grad_(False)
    before, late = signal.signal(signal.SIGALRM, handler), []
    try:
        with ActivationCache(model, directory, "0", gate="always") as cache:
            for number, (x, _) in enumerate(EgeriaLoader(rows(), batch_size=8, cache=cache)):
                try:
                    model(x)
                except Provoked:
                    late.append(number)
            assert late == [0]
            assert "time is over" in str(cache.stats().why_not)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_an_error_is_kept_and_what_is_none_of_ours_goes_out():
    told = []
    with Attempt(told.append) as tried:
        raise SystemExit
    assert told == [tried.error]
    with pytest.raises(KeyboardInterrupt), Attempt():
        raise KeyboardInterrupt
    with pytest.raises(Provoked), Attempt(but=Provoked):
        raise Provoked


def test_what_was_tried_is_not_kept_in_memory():
    class Large:
        pass

    def fail():
        large = Large()
        seen.append(weakref.ref(large))
        raise Provoked

    seen = []
    gc.disable()
    try:
        with Attempt() as tried:
            fail()
        assert tried.error is not None
        assert seen[0]() is None
    finally:
        gc.enable()


def frozen(make=Net):
    model = make()
    for part in (model.early, model.middle):
        part.requires_grad_(False)
    return model


def test_a_boundary_that_cannot_be_cut_raises_at_the_first_call_or_never(directory):
    class Mixing(Net):
        def front(self, x):
            return super().front(x - x.mean(0))

    for calls_before in (0, 1):
        model, data = frozen(Mixing), rows()
        with ActivationCache(model, directory, "middle", gate="always") as cache:
            for _ in range(calls_before):
                model(data.tensors[0][:4])
            batches = iter(EgeriaLoader(data, batch_size=8, cache=cache))
            if not calls_before:
                with pytest.raises(BoundaryError, match="mixes the samples"):
                    model(next(batches)[0])
            model(next(batches)[0])
            assert "mixes the samples" in str(cache.stats().why_not)
            assert not cache.stats().failures


def test_failures_are_counted(directory, monkeypatch):
    model = frozen()
    provoked(monkeypatch, "store.generation.Generation.put_batch", 0)
    with ActivationCache(model, directory, "middle", gate="always") as cache:
        for x, _ in EgeriaLoader(rows(), batch_size=8, cache=cache):
            model(x)
        assert cache.stats().failures == 1
        assert "Provoked" in str(cache.stats().why_not)


@pytest.mark.parametrize(
    ("scope", "expected"),
    [
        ({}, False),
        ({"__name__": "egeria_cache_of_mine"}, False),
        ({"__name__": "egeria_cache.x"}, True),
    ],
    ids=["generated", "alike", "ours"],
)
def test_an_error_is_ours_by_the_code_that_raises_it(scope, expected):
    """The globals of generated code, that of torch.fx say, need not have a `__name__`."""
    exec("def fails():\n    raise KeyError(7)", scope)
    with pytest.raises(KeyError) as raised:
        scope["fails"]()
    assert is_ours(raised.value) is expected


def test_two_trainings_in_two_threads_are_as_each_alone(tmp_path):
    """Samples are seeded in one while the other proves its cut."""

    def losses(number, where):
        model, found = copy.deepcopy(models[number]), []
        optimizer = sgd(model)
        cache = where and ActivationCache(model, where, "middle", gate="always")
        loader = EgeriaLoader(rows(48, number), 8, cache=cache)
        for _ in range(4):
            found += (take_step(cross_entropy(model, one), optimizer).item() for one in loader)
        if cache:
            cache.close()
        return found

    models = [frozen(), frozen()]
    alone = [losses(number, None) for number in range(2)]
    for turn in range(4):
        with ThreadPoolExecutor(2) as pool:
            tried = [pool.submit(losses, n, tmp_path / f"{turn}{n}") for n in range(2)]
        assert [one.result() for one in tried] == alone
