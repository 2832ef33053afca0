"""The likeliest mistakes, each made for real: docs/troubleshooting.md shows what is said of them.

    python -m tests.docs.mistakes    # writes the document anew

A mistake is a function that makes it, under a heading of the document. Whatever it logs as a
warning, raises or returns is the message, which stands there; the rest is written by hand.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import io
import logging
import os
import re
import sys
import tempfile
import textwrap
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from egeria_cache import ActivationCache, ActivationStore, EgeriaLoader
from egeria_cache.inspect import main as cache_inspect
from egeria_cache.store.disk import place
from egeria_core import FreezeController
from egeria_core.pipeline import PipelinePlan
from tests.helpers.steps import take_step

DOCUMENT = Path(__file__).parents[2] / "docs" / "troubleshooting.md"


@dataclass(frozen=True)
class Mistake:
    """One way to go wrong."""

    title: str
    make: Callable[[Path], object]

    def message(self) -> str:
        """Make the mistake in an empty directory and return what is said of it."""
        with tempfile.TemporaryDirectory() as scratch:
            heard = _Heard()
            logger = logging.getLogger("egeria")
            storage = logging.getLogger("egeria_cache.store")
            logger.addHandler(heard)
            storage.addHandler(heard)
            try:
                told = self.make(Path(scratch))
            except Exception as error:
                if not _is_ours(error):
                    raise
                told = f"{type(error).__name__}: {error}"
            finally:
                logger.removeHandler(heard)
                storage.removeHandler(heard)
            parts = [*dict.fromkeys(heard.texts)] if told is None else [str(told)]
            return _normal("\n".join(parts), scratch)


MISTAKES: list[Mistake] = []


def mistake(title: str) -> Callable[[Callable[[Path], object]], object]:
    """Register a function that makes a mistake."""

    return lambda make: MISTAKES.append(Mistake(title, make))


def _is_ours(error: Exception) -> bool:
    """Whether a statement of ours raises it: no accident, in our code or another's."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return "/egeria_" in last.filename and (last.line or "").startswith("raise")


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _normal(text: str, scratch: str) -> str:
    text = text.replace(os.path.realpath(scratch), "runs").replace(scratch, "runs")
    text = re.sub(rf"{Path(__file__).name}, line \d+", "train.py, line 12", text)
    text = re.sub(r"gen-[0-9a-f]{12}", "gen-0123456789ab", text)
    text = re.sub(r"(?<![\w.])\d\.\d\d+(e-\d+)?(?![\w.])", "0.12", text)  # how far something is off
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


# ---- what they are made with -------------------------------------------------------------------


class Net(nn.Module):
    """Two frozen blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 3)

    def front(self, x):
        x = torch.relu(self.stem(x))
        for block in self.blocks:
            x = torch.relu(block(x))
        return x

    def forward(self, x):
        return self.head(self.front(x))


def model(net: type[nn.Module] = Net, frozen: tuple[str, ...] = ("stem", "blocks")) -> nn.Module:
    torch.manual_seed(0)
    made = net()
    for name in frozen:
        made.get_submodule(name).requires_grad_(False)
    return made


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(32, 6, generator=generator), torch.arange(32) % 3)


def train(net, loader, epochs=2, before=lambda x: x, call=None):
    """An ordinary loop."""
    optimizer = torch.optim.SGD((p for p in net.parameters() if p.requires_grad), 0.1)
    for _ in range(epochs):
        for x, y in loader:
            take_step(F.cross_entropy((net if call is None else call)(before(x)), y), optimizer)


def cached(net, where: Path, **options) -> ActivationCache:
    return ActivationCache(net, where / "cache", **{"boundary": "blocks.1", **options})


def changed(where: Path, change) -> None:
    """Train for an epoch, do something to the model or the cache, and train for another."""
    net = model()
    with cached(net, where) as cache:
        loader = EgeriaLoader(samples(), 8, cache=cache)
        train(net, loader, 1)
        change(net, cache)
        train(net, loader, 1)


def trained(net, where: Path, data=None, size=8, epochs=2, *, load=None, loop=None, **options):
    """Train with a cache and a loader of its; return what the cache says."""
    with cached(net, where, **options) as cache:
        loader = EgeriaLoader(samples() if data is None else data, size, cache=cache, **load or {})
        train(net, loader, epochs, **loop or {})
        return cache.stats().why_not


# ---- the boundary ------------------------------------------------------------------------------


@mistake("The boundary's name is wrong")
def unknown_boundary(where):
    cached(model(), where, boundary="blok.1")


@mistake("The boundary is a list of blocks")
def list_as_boundary(where):
    trained(model(), where, boundary="blocks")


@mistake("A part of the front still trains")
def trainable_prefix(where):
    trained(model(frozen=("blocks",)), where)


@mistake("Samples of a batch look at each other")
def mixed_samples(where):
    class Mixing(Net):
        def front(self, x):
            return super().front(x - x.mean(0))

    trained(model(Mixing), where, load={"shuffle": True})


@mistake("Something behind the boundary reads what a skipped module left behind")
def left_behind(where):
    class Keeping(nn.Linear):
        def forward(self, x):
            self.scale = float(x.abs().mean())
            return super().forward(x)

    class Reading(Net):
        def __init__(self):
            super().__init__()
            self.stem = Keeping(6, 8)

        def forward(self, x):
            return self.head(self.front(x)) * self.stem.scale

    trained(model(Reading), where)


@mistake("The model is compiled as a whole")
def compiled_whole(where):
    net = model()
    trained(net, where, loop={"call": torch.compile(net, backend="eager")})
    torch._dynamo.reset()


@mistake("Nothing is frozen")
def nothing_frozen(where):
    trained(model(frozen=()), where, boundary="auto")


@mistake("The loop calls another model")
def copy_is_called(where):
    net = model()
    trained(net, where, loop={"call": copy.deepcopy(net)})


@mistake("The cache was closed before the last epoch")
def closed_early(where):
    changed(where, lambda net, cache: cache.close())


# ---- data --------------------------------------------------------------------------------------


@mistake("The data set is iterable")
def iterable_data(where):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(samples())

    trained(model(), where, Stream())


@mistake("The batches come from another loader")
def another_loader(where):
    net = model()
    with cached(net, where) as cache:
        loader = EgeriaLoader(samples(), 8, cache=cache)
        train(net, DataLoader(loader.dataset, 8))


@mistake("A DataLoader is given in place of the data set")
def loader_as_data(where):
    with cached(model(), where) as cache:
        EgeriaLoader(DataLoader(samples(), 8), cache=cache)


@mistake("`batch_size=None`")
def no_batches(where):
    trained(model(), where, size=None)


@mistake("A batch is a list of samples (the collate function of detection)")
def lists_of_samples(where):
    net = model()
    with cached(net, where, gate="always") as cache:
        loader = EgeriaLoader(
            samples(), 8, cache=cache, collate_fn=lambda batch: tuple(zip(*batch, strict=True))
        )
        for pictures, targets in loader:
            F.cross_entropy(net(torch.stack(pictures)), torch.stack(targets)).backward()


@mistake("Samples are mixed in the loop (mixup, CutMix)")
def mixed_in_the_loop(where):
    loop = {"before": lambda x: 0.7 * x + 0.3 * x.flip(0)}
    trained(model(), where, epochs=4, load={"shuffle": True}, loop=loop, gate="always")


@mistake("The loop asks for a gradient of its inputs (FGSM, saliency)")
def gradient_of_the_inputs(where):
    loop = {"before": lambda x: x.requires_grad_()}
    trained(model(), where, epochs=4, load={"shuffle": True}, loop=loop, gate="always")


@mistake("The loop changes its batches, each time differently")
def noise_in_the_loop(where):
    loop = {"before": lambda x: x + torch.randn_like(x)}
    trained(model(), where, size=4, epochs=4, loop=loop, gate="always")


@mistake("A sample differs each time it is loaded")
def restless_data(where):
    class Restless(Dataset):
        def __len__(self):
            return 32

        def __getitem__(self, index):
            noise = int.from_bytes(os.urandom(4), "little") / 2**32
            return torch.full((6,), index + noise), index % 3

    said = trained(model(), where, Restless(), epochs=3, audit_rate=1.0, gate="always")
    return re.sub(r"samples \[.*?\]", "samples [...]", said or "")


@mistake("Padding is read")
def padding_is_read(where):
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(20, 8)
            self.mix = nn.GRU(8, 8, batch_first=True, bidirectional=True)
            self.head = nn.Linear(16, 3)

        def forward(self, tokens):
            return self.head(self.mix(self.embedding(tokens))[0].mean(1))

    def padded(batch):
        tokens = [torch.tensor(one) for one, _ in batch]
        targets = torch.tensor([target for _, target in batch])
        return nn.utils.rnn.pad_sequence(tokens, batch_first=True), targets

    data = [([1 + (i + k) % 19 for k in range(3 + i % 5)], i % 3) for i in range(32)]
    net = model(Reader, ("embedding", "mix"))
    return trained(net, where, data, load={"collate_fn": padded}, boundary="mix")


# ---- weights -----------------------------------------------------------------------------------


@mistake("The frozen front changes under way")
def weights_change(where):
    changed(where, torch.no_grad()(lambda net, cache: net.stem.weight.mul_(1.01)))


@mistake("A frozen layer is thawed again")
def thawed(where):
    changed(where, lambda net, cache: net.blocks[1].requires_grad_(True))


@mistake("A second run finds nothing in the cache")
def nothing_found(where):
    for seed in (0, 1):
        net = model()
        with torch.no_grad():
            net.stem.weight += seed
        trained(net, where, epochs=1)
    names = sorted(path.name for path in (where / "cache").glob("gen-*"))
    said = io.StringIO()
    with contextlib.redirect_stdout(said), mock.patch.dict(os.environ, COLUMNS="60"):
        cache_inspect([str(where / "cache"), "diff", *names])
    field = said.getvalue().splitlines()[1].split()[0]
    return f"cache-inspect runs/cache diff GEN GEN names the field: {field}"


# ---- the directory -----------------------------------------------------------------------------


@mistake("The directory holds something else")
def foreign_directory(where):
    (where / "cache").mkdir()
    (where / "cache" / "thesis.tex").touch()
    cached(model(), where)


@mistake("The directory cannot be written")
def unwritable(where):
    refused = PermissionError(errno.EACCES, "Permission denied")
    with mock.patch.object(Path, "mkdir", side_effect=refused):
        cached(model(), where)


@mistake("Others may write to the directory")
def open_directory(where):
    (where / "cache").mkdir(mode=0o777)
    (where / "cache").chmod(0o777)
    cached(model(), where)


@mistake("The directory lies on a network filesystem")
def network_directory(where):
    with mock.patch.object(place, "network_type", return_value="nfs4"):
        cached(model(), where)


@mistake("The limit is too small")
def small_limit(where):
    net = model()
    with cached(net, where, limit="100kB", gate="always", codec="raw") as cache:
        data = TensorDataset(torch.randn(4096, 6), torch.arange(4096) % 3)
        train(net, EgeriaLoader(data, 64, cache=cache), 1)
        cache.flush()


# ---- processes ---------------------------------------------------------------------------------


@mistake("The process was forked after the cache was opened")
def forked(where):
    net = model()
    cache = cached(net, where)
    loader = EgeriaLoader(samples(), 8, cache=cache)
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            train(net, loader, 1)
            os.write(writer, (cache.stats().why_not or "nothing was said").encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as said:
        text = said.read().decode()
    os.waitpid(child, 0)
    cache.close()
    return text


# ---- arguments ---------------------------------------------------------------------------------


@mistake("Records of another shape are stored beside others")
def another_layout(where):
    with ActivationStore(where / "cache") as store:
        stored = store.open_generation({"use": "mine"})
        stored.put_batch([1, 2], {"value": torch.zeros(2, 512)})
        store.flush()
        stored.put_batch([3], {"value": torch.zeros(1, 256)})
        store.flush()


@mistake("The controller does not know how long training is")
def no_schedule(where):
    net = model(frozen=())
    FreezeController(net, torch.optim.SGD(net.parameters(), 0.1), policy="plasticity")


@mistake("The controller is not told the loss")
def no_loss(where):
    net = model(frozen=())
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with FreezeController(net, optimizer, policy="plasticity", evaluate_every=1) as controller:
        net(torch.randn(4, 6)).sum().backward()
        optimizer.step()
        controller.step()


@mistake("A pipeline's schedule has several stages on a rank")
def interleaved_stages(where):
    PipelinePlan.start([1.0] * 8, 2, schedule="Interleaved1F1B", microbatches=8)


def document() -> str:
    """Return the page with what is said of each mistake."""
    page = DOCUMENT.read_text()
    for one in MISTAKES:
        heading = rf"^## {re.escape(one.title)}\n(?:(?!## )[^\n]*\n)*?```text\n"
        parts = re.split(rf"({heading}).*?(^```$)", page, flags=re.MULTILINE | re.DOTALL)
        assert len(parts) == 4, f"the document has no place for {one.title!r}"
        page = f"{parts[0]}{parts[1]}{_wrapped(one.message())}\n{parts[2]}{parts[3]}"
    return page


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.fill(line, 98, break_long_words=False) for line in text.splitlines())


if __name__ == "__main__":
    os.environ["EGERIA_POSTPONE"] = "0"  # as in tests: what is short is stored, too
    torch.set_num_threads(1)  # one makes a mistake in a child, to which OpenMP's threads do not go
    DOCUMENT.write_text(document())
    sys.exit(0)
