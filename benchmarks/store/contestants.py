"""What the store is compared with: each stores rows by number and reads random batches of them."""

# ruff: noqa: D102 (the methods are those of Contestant)
from __future__ import annotations

import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import numpy.typing as npt
import torch
import xxhash
import zstandard
from torch import Tensor

from egeria_cache.store import ActivationStore

__all__ = [
    "BATCH",
    "CONTESTANTS",
    "FIELDS",
    "OFFER_AGAIN_S",
    "BareLmdb",
    "Contestant",
    "Egeria",
    "EgeriaRaw",
    "Ids",
    "LmdbHash",
    "Memmap",
    "MemmapFound",
]

BATCH = 128
FIELDS = {"use": "benchmark"}
OFFER_AGAIN_S = 0.01
"""After so long a batch that found the queue full is offered again."""
Ids = npt.NDArray[np.int64]


class Contestant(ABC):
    """Something that stores rows by number and reads random batches of them."""

    name: str
    durable = False
    """A batch is on disk when `write` has returned."""

    def __init__(self, directory: Path, rows: Tensor) -> None:
        self.directory = directory
        self.shape, self.dtype = tuple(rows.shape[1:]), rows.dtype
        self.num_samples = len(rows)
        self.row_bytes = rows[0].nbytes

    @abstractmethod
    def write(self, rows: Tensor) -> None:
        """Store all rows."""

    @abstractmethod
    def open(self) -> None:
        """Make ready to read; timed."""

    @abstractmethod
    def read(self, ids: Ids) -> Tensor:
        """Return the rows in one tensor."""

    def close(self) -> None:  # noqa: B027
        """Let go of files, if any are held."""

    def tensor(self, flat: npt.NDArray[Any]) -> Tensor:
        """View (B, bytes) as rows."""
        return torch.from_numpy(flat).view(self.dtype).view(len(flat), *self.shape)

    def bytes_on_disk(self) -> int:
        """Of all files, in whole blocks, as du counts."""
        files = [path.stat() for path in self.directory.rglob("*") if path.is_file()]
        return sum(-(-stat.st_size // 4096) * 4096 for stat in files)


def matrix(rows: Tensor) -> npt.NDArray[np.uint8]:
    """View rows as bytes, (N, bytes)."""
    flat: npt.NDArray[np.uint8] = rows.reshape(len(rows), -1).view(torch.uint8).numpy()
    return flat


class Egeria(Contestant):
    """The store as it comes."""

    durable = True
    codec = "auto"
    name = "egeria auto"

    def __init__(self, directory: Path, rows: Tensor) -> None:
        super().__init__(directory, rows)
        self.put_s: list[float] = []
        """Time of this thread in each put that was taken, but for the first, which makes the
        generation."""

    def write(self, rows: Tensor) -> None:
        with ActivationStore(self.directory, codec=self.codec) as store:
            stored = store.open_generation(FIELDS)
            for start in range(0, len(rows), BATCH):
                batch = rows[start : start + BATCH]
                ids = range(start, start + len(batch))
                started_s = time.thread_time()
                while not stored.put_batch(ids, {"x": batch}):
                    time.sleep(OFFER_AGAIN_S)
                    started_s = time.thread_time()
                if start:
                    self.put_s.append(time.thread_time() - started_s)
            store.flush()

    def open(self) -> None:
        self.store = ActivationStore(self.directory)
        self.stored = self.store.open_generation(FIELDS)
        self.stored.contains([0])

    def read(self, ids: Ids) -> Tensor:
        found, hit = self.stored.get_batch(ids)  # type: ignore[arg-type]
        assert hit.all()
        return found["x"]  # type: ignore[no-any-return]

    def close(self) -> None:
        self.store.close()


class EgeriaRaw(Egeria):
    """The store without a codec."""

    codec = "raw"
    name = "egeria raw"


class BareLmdb(Contestant):
    """What the store is made of: a look-up and a copy, no checksum."""

    durable = True
    name = "LMDB copy loop"

    def pack(self, row: npt.NDArray[np.uint8]) -> Any:
        return row.data

    def write(self, rows: Tensor) -> None:
        environment = lmdb.open(str(self.directory), map_size=2**36, metasync=False)
        flat = matrix(rows)
        for start in range(0, len(rows), BATCH):
            with environment.begin(write=True) as transaction:
                for one in range(start, min(start + BATCH, len(rows))):
                    transaction.put(one.to_bytes(8, "big"), self.pack(flat[one]))
        environment.close()

    def open(self) -> None:
        self.environment = lmdb.open(str(self.directory), map_size=2**36, readahead=False)

    def read(self, ids: Ids) -> Tensor:
        out = np.empty((len(ids), self.row_bytes), np.uint8)
        with self.environment.begin(buffers=True) as transaction:
            for row, one in enumerate(ids.tolist()):
                out[row] = np.frombuffer(transaction.get(one.to_bytes(8, "big")) or b"", np.uint8)
        return self.tensor(out)

    def close(self) -> None:
        self.environment.close()


class LmdbZstd(BareLmdb):
    """The obvious way to compress: one frame a row, one thread."""

    name = "LMDB + zstd loop"

    def __init__(self, directory: Path, rows: Tensor) -> None:
        super().__init__(directory, rows)
        self.compressor = zstandard.ZstdCompressor(level=1)
        self.decompressor = zstandard.ZstdDecompressor()

    def pack(self, row: npt.NDArray[np.uint8]) -> Any:
        return self.compressor.compress(row.data)

    def read(self, ids: Ids) -> Tensor:
        out = np.empty((len(ids), self.row_bytes), np.uint8)
        with self.environment.begin(buffers=True) as transaction:
            for row, one in enumerate(ids.tolist()):
                stored = transaction.get(one.to_bytes(8, "big")) or b""
                out[row] = np.frombuffer(self.decompressor.decompress(stored), np.uint8)
        return self.tensor(out)


class LmdbHash(BareLmdb):
    """The copy loop, and the hash that every record of ours has, written and read."""

    name = "LMDB copy + hash loop"

    def pack(self, row: npt.NDArray[np.uint8]) -> Any:
        xxhash.xxh3_64_intdigest(row.data)
        return row.data

    def read(self, ids: Ids) -> Tensor:
        out = np.empty((len(ids), self.row_bytes), np.uint8)
        with self.environment.begin(buffers=True) as transaction:
            for row, one in enumerate(ids.tolist()):
                out[row] = np.frombuffer(transaction.get(one.to_bytes(8, "big")) or b"", np.uint8)
                xxhash.xxh3_64_intdigest(out[row])
        return self.tensor(out)


class Memmap(Contestant):
    """One file of equal rows."""

    name = "np.take on a memmap"

    def write(self, rows: Tensor) -> None:
        matrix(rows).tofile(self.directory / "rows.bin")

    def open(self) -> None:
        shape = (self.num_samples, self.row_bytes)
        self.rows = np.memmap(self.directory / "rows.bin", np.uint8, "r", shape=shape)

    def read(self, ids: Ids) -> Tensor:
        return self.tensor(np.take(self.rows, ids, axis=0))

    def close(self) -> None:
        del self.rows


class MemmapFound(Memmap):
    """The same, of rows that LMDB finds by their names: what is left without checksums, layouts,
    codecs, or other processes that write. Nothing that looks rows up so is much faster.
    """

    name = "np.take after LMDB look-ups"

    def write(self, rows: Tensor) -> None:
        super().write(rows)
        places = ((one.to_bytes(8, "big"), one.to_bytes(16, "little")) for one in range(len(rows)))
        with (
            lmdb.open(str(self.directory), map_size=2**36) as environment,
            environment.begin(write=True) as transaction,
        ):
            transaction.cursor().putmulti(places)

    def open(self) -> None:
        super().open()
        self.environment = lmdb.open(str(self.directory), map_size=2**36, readahead=False)

    def read(self, ids: Ids) -> Tensor:
        with self.environment.begin() as transaction:
            get = transaction.get
            found = b"".join([get(one.to_bytes(8, "big"), b"") for one in ids.tolist()])
        return super().read(np.frombuffer(found, np.int64)[::2])

    def close(self) -> None:
        super().close()
        self.environment.close()


class TensorDictMemmap(Contestant):
    """tensordict's memory-mapped tensors."""

    name = "tensordict memmap"

    def write(self, rows: Tensor) -> None:
        from tensordict import TensorDict

        TensorDict({"act": rows}, [len(rows)]).memmap(self.directory)

    def open(self) -> None:
        from tensordict import TensorDict

        self.rows = TensorDict.load_memmap(self.directory)

    def read(self, ids: Ids) -> Tensor:
        return self.rows[torch.from_numpy(ids)]["act"]  # type: ignore[no-any-return]


class Safetensors(Contestant):
    """One file, one named tensor a row."""

    name = "safetensors"

    def write(self, rows: Tensor) -> None:
        from safetensors.torch import save_file

        named = {str(one): row.clone() for one, row in enumerate(rows)}
        save_file(named, self.directory / "rows.safetensors")

    def open(self) -> None:
        from safetensors import safe_open

        self.file: Any = safe_open(self.directory / "rows.safetensors", "pt")

    def read(self, ids: Ids) -> Tensor:
        return torch.stack([self.file.get_tensor(str(one)) for one in ids.tolist()])


class Blosc2(Contestant):
    """A super-chunk on disk, a chunk a row: shuffle and zstd, two threads."""

    name = "Blosc2"

    def write(self, rows: Tensor) -> None:
        import blosc2

        schunk = blosc2.SChunk(
            chunksize=self.row_bytes,
            urlpath=str(self.directory / "rows.b2frame"),
            contiguous=True,
            cparams={
                "codec": blosc2.Codec.ZSTD,
                "clevel": 1,
                "typesize": self.dtype.itemsize,
                "filters": [blosc2.Filter.SHUFFLE],
                "nthreads": 2,
            },
        )
        for row in matrix(rows):
            schunk.append_data(row)

    def open(self) -> None:
        import blosc2

        path = str(self.directory / "rows.b2frame")
        self.schunk = blosc2.open(path, mode="r", dparams={"nthreads": 2})

    def read(self, ids: Ids) -> Tensor:
        out = np.empty((len(ids), self.row_bytes), np.uint8)
        for row, one in enumerate(ids.tolist()):
            self.schunk.decompress_chunk(one, dst=out[row])
        return self.tensor(out)


class Zarr(Contestant):
    """An array with a chunk a row, its default codec."""

    name = "Zarr"

    def write(self, rows: Tensor) -> None:
        import zarr

        flat = matrix(rows).view(f"u{self.dtype.itemsize}")
        array = zarr.create_array(
            self.directory / "rows.zarr",
            shape=flat.shape,
            chunks=(1, flat.shape[1]),
            dtype=flat.dtype,
        )
        array[:] = flat

    def open(self) -> None:
        import zarr

        self.array = zarr.open_array(self.directory / "rows.zarr", mode="r")

    def read(self, ids: Ids) -> Tensor:
        rows = np.ascontiguousarray(self.array.oindex[ids, :])
        return self.tensor(rows.view(np.uint8))


class TorchFiles(Contestant):
    """A file a row, as most hand-made caches do."""

    name = "torch.save per file"

    def write(self, rows: Tensor) -> None:
        for one, row in enumerate(rows):
            torch.save(row.clone(), self.directory / f"{one}.pt")

    def open(self) -> None:
        pass

    def read(self, ids: Ids) -> Tensor:
        return torch.stack(
            [torch.load(self.directory / f"{one}.pt", weights_only=True) for one in ids.tolist()]
        )


CONTESTANTS: tuple[type[Contestant], ...] = (
    Egeria, EgeriaRaw, BareLmdb, LmdbHash, LmdbZstd, Memmap, MemmapFound,
    TensorDictMemmap, Safetensors, Blosc2, Zarr, TorchFiles,
)  # fmt: skip
