from __future__ import annotations

import subprocess
import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import egeria_cache.store.disk.place as place_module
from egeria_cache import ActivationCache
from egeria_cache.errors import StoreError
from egeria_cache.store.disk.place import filesystem_type
from egeria_cache.store.store import ActivationStore
from tests.store.conftest import warnings_of


def mounts(*pairs):
    return lambda all: [SimpleNamespace(mountpoint=path, fstype=kind) for path, kind in pairs]


@pytest.mark.parametrize(
    ("path", "expected"),
    [("/data/nfs/a/b", "nfs4"), ("/data/nfsother", "ext4"), ("/data/nfs", "nfs4"), ("/x", "xfs")],
)
def test_the_innermost_mount_decides_the_filesystem(monkeypatch, path, expected):
    table = mounts(("/", "rootfs"), ("/", "xfs"), ("/data", "ext4"), ("/data/nfs", "nfs4"))
    monkeypatch.setattr(place_module.psutil, "disk_partitions", table)
    assert filesystem_type(path) == expected


@pytest.mark.parametrize(
    "made",
    [ActivationStore, partial(ActivationCache, torch.nn.Linear(2, 2))],
    ids=["store", "cache"],
)
def test_a_network_filesystem_is_refused_unless_forced(directory, monkeypatch, made):
    monkeypatch.setattr(place_module.psutil, "disk_partitions", mounts(("/", "nfs")))
    with pytest.raises(StoreError, match=r"network filesystem \(nfs\).*force_network=True"):
        made(directory)
    assert not directory.exists()
    made(directory, force_network=True).close()


def test_a_beginning_that_was_cut_short_is_no_foreign_file(directory):
    directory.mkdir()
    (directory / ".cache.json.4711-1").write_text("{")
    ActivationStore(directory).close()
    assert (directory / "cache.json").exists()


def test_a_new_directory_may_be_claimed_by_several_at_once(tmp_path):
    for turn in range(20):
        barrier, errors = threading.Barrier(4), []

        def claim(place, barrier=barrier, errors=errors):
            barrier.wait()
            try:
                place_module.claim_directory(place, 10**6, force_network=False)
            except StoreError as error:
                errors.append(error)

        threads = [threading.Thread(target=claim, args=(tmp_path / str(turn),)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert [path.name for path in (tmp_path / str(turn)).iterdir()] == ["cache.json"]


def test_mounts_that_cannot_be_listed_are_no_reason_to_refuse(directory, monkeypatch):
    def fail(all):
        raise OSError("no /proc")

    monkeypatch.setattr(place_module.psutil, "disk_partitions", fail)
    ActivationStore(directory).close()


@pytest.fixture
def read_only(directory, tmp_path):
    with ActivationStore(directory, "1GB") as store:
        store.put_batch([1, 2], torch.ones(2, 1000))
    view = tmp_path / "view"
    view.mkdir()
    for options in (["--bind", directory, view], ["-o", "remount,ro,bind", view]):
        if subprocess.run(["mount", *options], capture_output=True, check=False).returncode:
            pytest.skip("a read-only mount needs root")
    yield view
    subprocess.run(["umount", "-l", view], check=True)


def test_a_read_only_cache_is_served_and_not_written(read_only, caplog):
    with ActivationStore(read_only, "2GB") as store:
        assert store.get_batch([1, 2, 3])[1].tolist() == [True, True, False]
        assert not store.put_batch([3], torch.ones(1, 1000))
        assert not store.get_batch([3])[1].any()
        new = store.open_generation({"not": "there"})
        assert not new.alive
        assert not new.put_batch([1], torch.ones(1))
        assert not new.get_batch([1])[1].any()
        new.void("test")
        new.release()
    (warning,) = warnings_of(caplog)
    assert "nothing is stored" in warning
