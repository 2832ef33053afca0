"""Rules of the product, broken one by one: tests that are run by default notice each.

A mutation is text that is exchanged in a copy of the packages; where the text is gone, the rule has
moved, and its row must follow. The tests that are named must fail then, at least one of them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("egeria_cache", "egeria_core")


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """A rule that is broken."""

    file: str
    old: str
    """Stands once in the file."""
    new: str
    caught_by: str
    """Files of tests, or single ones, apart by blanks."""


MUTATIONS = {
    "attributes of frozen modules are not compared": Mutation(
        file="egeria_cache/skip/state/guards.py",
        old="        reason = None if self._is_state_same() else self._explain_state()\n",
        new="        reason = None\n",
        caught_by="tests/hostile/test_prefix_values.py tests/hostile/test_prefix.py",
    ),
    "nothing of the frozen front is compared": Mutation(
        file="egeria_cache/skip/state/guards.py",
        old="        reason = None if self._is_state_same() else self._explain_state()\n",
        new="        return None\n",
        caught_by="tests/hostile/test_prefix.py tests/hostile/test_prefix_tensors.py",
    ),
    "version counters are ignored": Mutation(
        file="egeria_cache/skip/state/guards.py",
        old="            or list(map(_version, self._counted)) != self._versions\n",
        new="",
        caught_by="tests/hostile/test_prefix_tensors.py tests/skip/test_parts.py",
    ),
    "what is written through .data is not looked at": Mutation(
        file="egeria_cache/skip/state/guards.py",
        old="if reason is None and self._probe.changed(wait=wait):",
        new="if False:",
        caught_by="tests/hostile/test_prefix_tensors.py",
    ),
    "a module may become of another class": Mutation(
        file="egeria_cache/skip/state/guards.py",
        old="                and list(map(type, self._classed)) == self._kinds\n",
        new="",
        caught_by="tests/hostile/test_prefix.py",
    ),
    "rows computed under no_grad are anybody's": Mutation(
        file="egeria_cache/skip/serve/address.py",
        old='{"gradients": plan.grad_mode}',
        new="{}",
        caught_by="tests/hostile/test_prefix_values.py",
    ),
    "what an address does not tell apart is one": Mutation(
        file="egeria_cache/skip/engine.py",
        old="        if any(fields == cut.fields for cut in self._voided):\n",
        new="        if False:\n",
        caught_by="tests/hostile/test_prefix.py",
    ),
    "checksums of records are not compared": Mutation(
        file="egeria_cache/store/record.py",
        old="        if ends[-1] != size or checksum != expected:\n",
        new="        if ends[-1] != size:\n",
        caught_by="tests/store/test_records.py",
    ),
    "a generation that others use is taken for unused": Mutation(
        file="egeria_cache/store/disk/place.py",
        old="            return not _lock_alone(file.fileno())\n",
        new="            return False\n",
        caught_by="tests/store/test_trouble.py tests/cache/test_trouble.py",
    ),
    "another data set is believed to be the same": Mutation(
        file="egeria_cache/samples/fingerprint.py",
        old="{size}:{digest.hexdigest()}",
        new="{size}",
        caught_by="tests/samples/test_fingerprint.py",
    ),
    "a data set that changes is not noticed": Mutation(
        file="egeria_cache/samples/fingerprint.py",
        old="            what = self._changed(midway)\n",
        new="            what = None\n",
        caught_by="tests/hostile/test_data.py",
    ),
    "autocast is not part of a signature": Mutation(
        file="egeria_cache/skip/serve/call.py",
        old="        return (self.layout, tuple(leaves), autocast, ",
        new="        return (self.layout, tuple(leaves), ",
        caught_by="tests/skip/test_modes.py tests/hostile/test_prefix_values.py",
    ),
    "rows of a prefix that has changed are kept": Mutation(
        file="egeria_cache/cache/engine_callbacks.py",
        old="""        log.log(level, "%s: cached activations are void", self.counters.passing)
        self.views.void(lambda view: True, unlink=unlink)
""",
        new="""        log.log(level, "%s: cached activations are void", self.counters.passing)
""",
        caught_by="tests/cache/test_equality.py",
    ),
    "the frozen front follows train()": Mutation(
        file="egeria_cache/skip/model/frozen.py",
        old="self.module.training = mode and self.keeps_flag",
        new="self.module.training = mode",
        caught_by="tests/skip/test_frozen.py",
    ),
    "an epoch that is resumed is drawn anew": Mutation(
        file="egeria_cache/loader/loader.py",
        old="            rng.set(last.start)\n            if last.yielded",
        new="            if last.yielded",
        caught_by="tests/loader/test_resume.py",
    ),
    "a resumed epoch begins at its first batch": Mutation(
        file="egeria_cache/loader/loader.py",
        old="chain(drawn[progress.yielded :], batches)",
        new="chain(drawn, batches)",
        caught_by="tests/loader/test_resume.py",
    ),
    "no hit is audited": Mutation(
        file="egeria_cache/gate/policy.py",
        old="        hit, number = entry.hit, batch",
        new="        return None\n        hit, number = entry.hit, batch",
        caught_by="tests/cache/test_staleness.py",
    ),
    "samples may depend on each other": Mutation(
        file="egeria_cache/skip/prove/purity.py",
        old="    suspects: dict[int, tuple[Recomputed, int]] = {}\n",
        new="    return\n    suspects: dict[int, tuple[Recomputed, int]] = {}\n",
        caught_by="tests/hostile/test_proof.py",
    ),
    "float64 tells of a few rows alone": Mutation(
        file="egeria_cache/skip/prove/purity.py",
        old="(company[::-1], *apart, *whole, *again)",
        new="(company[::-1], *apart, *again)",
        caught_by="tests/skip/test_independence.py",
    ),
    "what skipped layers count may stand still": Mutation(
        file="egeria_cache/skip/prove/purity.py",
        old="            if mark in anew:\n",
        new="            if False:\n",
        caught_by="tests/hostile/test_prefix_values.py",
    ),
    "all runs of a proof draw the same numbers": Mutation(
        file="egeria_cache/skip/prove/traced_batch.py",
        old="        RandomState.seed(self._num_runs)\n",
        new="        RandomState.seed(1)\n",
        caught_by="tests/skip/test_independence.py",
    ),
    "an output that cannot be had on a hit is given out": Mutation(
        file="egeria_cache/skip/prove/proof.py",
        old="            opaque.add(i)\n",
        new="            pass\n",
        caught_by="tests/skip/test_adversarial.py",
    ),
    "what lies beyond a boundary that moved back is kept": Mutation(
        file="egeria_cache/skip/serve/plan.py",
        old='        return name.startswith(self.boundary + ".") or any(',
        new="        return False and any(",
        caught_by="tests/cache/test_equality.py",
    ),
    "what the gate has stopped is served on": Mutation(
        file="egeria_cache/cache/loader_api.py",
        old="        if why is not None:\n            log.info(",
        new="        if why is not None:\n            return\n            log.info(",
        caught_by="tests/gate/test_policy.py",
    ),
    "what was loaded of the old data is stored as of the new": Mutation(
        file="egeria_cache/cache/engine_callbacks.py",
        old="        if batch.context.is_outdated:\n            return  #",
        new="        if False:\n            return  #",
        caught_by="tests/cache/test_equality.py",
    ),
    "what a hit needs after all is not computed in it": Mutation(
        file="egeria_cache/skip/serve/placeholder.py",
        old="        if self.why is None and self.is_hit and not self.finished:\n",
        new="        if False:\n",
        caught_by="tests/hostile/test_seams.py",
    ),
    "rows of a training serve an evaluation": Mutation(
        file="egeria_cache/skip/serve/plan.py",
        old="self.others)) != self.modes:\n",
        new="self.others)) == ():\n",
        caught_by="tests/skip/test_adversarial.py",
    ),
    "a new draw has the number of the old one": Mutation(
        file="egeria_cache/samples/draws.py",
        old="        return clock.since + newest\n",
        new="        return clock.since + 0 * newest\n",
        caught_by="tests/samples/test_draws.py tests/cache/test_refurbished.py",
    ),
    "what the front would read is not compared": Mutation(
        file="egeria_cache/loader/assembly.py",
        old="            if torch.equal(entry.kept[PRINT], prints[entry.hit]):",
        new="            if len(prints):",
        caught_by="tests/cache/test_steady.py",
    ),
}


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rule", MUTATIONS)
def test_a_broken_rule_is_noticed(rule: str, tmp_path: Path) -> None:
    mutation = MUTATIONS[rule]
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package)
    path = tmp_path / mutation.file
    assert path.read_text().count(mutation.old) == 1, f"{rule}: the rule is elsewhere by now"
    path.write_text(path.read_text().replace(mutation.old, mutation.new))
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist",
            "-m", "not long", "-o", f"pythonpath={tmp_path} . examples",
            *mutation.caught_by.split(),
        ],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 1, f"{rule}: {done.stdout[-2000:]}{done.stderr[-2000:]}"


def test_every_rule_stands_where_it_is_said_to_be() -> None:
    moved = [
        rule for rule, one in MUTATIONS.items() if (ROOT / one.file).read_text().count(one.old) != 1
    ]
    assert not moved
