"""torchdata's own resume suite, with an EgeriaLoader in StatefulDataLoader's place.

EGERIA_TORCHDATA names a checkout of pytorch/data. What cannot hold of an EgeriaLoader stands here,
each with its reason; a test that fails and is not in this list fails the suite, and so does one of
the list that passes.
"""

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = ["test_state_dict.py", "test_sampler.py"]
ANY_ORDER = "batches that come in any order are refused when they are to go on in mid-epoch"
INSIDE = "asks for what lies inside a state of torchdata's"
AT_ONCE = "workers start without being waited for, as DataLoader's: an error comes with the batch"
PERSISTENT = (
    "what persistent workers keep from epoch to epoch lies in them, and is no part of a state"
)
KNOWN = {
    "TestNumWorkersMismatch_shard3.test_num_workers_mismatch": "workers may be more or fewer",
    "TestInitialState_shard0.test_initial_state": INSIDE,
    "TestInitialState_shard0.test_load_state_after_initial_state_dict": INSIDE,
    "TestInitialState_shard0.test_init_error": AT_ONCE,
    "TestDynamicStateIterableDataset_shard0.test": INSIDE,
    "TestDatasetIteratorStateDuplication_shard0.test": INSIDE,
    "TestSingleIterCalled_shard0.test_inline": INSIDE,
    "TestSingleIterCalled_shard0.test_inline_iter": INSIDE,
    "TestSingleIterCalled_shard0.test_mp": INSIDE,
    "TestSingleIterCalled_shard0.test_mp_iter": INSIDE,
    "TestOutOfOrderWithCheckpointing.test_out_of_order_iterable_ds_no_completed_workers": ANY_ORDER,
    "TestOutOfOrderWithCheckpointing.test_out_of_order_iterable_ds_one_completed_worker": ANY_ORDER,
    "TestOutOfOrderWithCheckpointing.test_out_of_order_index_ds": ANY_ORDER,
    "TestSnapshotEnd_shard2.test_iterable": PERSISTENT,
    "TestSnapshotEnd_shard2.test_map": PERSISTENT + " (batch_size=None: uncached, and unseeded)",
    "TestMultiEpochState_shard0.test_pw": PERSISTENT,
}


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_torchdatas_own_suite_passes_but_for_what_is_listed(tmp_path):
    checkout = os.environ.get("EGERIA_TORCHDATA")
    if checkout is None:
        pytest.skip("EGERIA_TORCHDATA does not name a checkout of pytorch/data")
    for module in ("torchdata", "expecttest", "parameterized"):
        pytest.importorskip(module)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    names = [Path(checkout) / "test" / "stateful_dataloader" / name for name in FILES]
    for name in names:
        (tmp_path / name.name).write_bytes(name.read_bytes())
    subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "--tb=no", "-p", "tests.helpers.torchdata_place",
            "--timeout=300", f"--junit-xml={tmp_path / 'found.xml'}", *FILES,
        ],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    cases = list(ElementTree.parse(tmp_path / "found.xml").iter("testcase"))
    failed = {
        f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    }
    print(f"{len(cases) - len(failed)} of {len(cases)} pass")
    assert failed == set(KNOWN)
    assert len(cases) > 90
