"""Each known results file: a title, what it means, and the columns that a person decides by."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .generic import generic_tables
from .parts import Section, Table, bytes_, number, percent, ratio, seconds, verdict

__all__ = ["read_sections"]

Report = dict[str, Any]


def read_sections(results: Path) -> list[Section]:
    """Return a section per JSON file: the known ones in their order, then the others by name.

    A file whose form a known section does not understand is shown as it is.
    """
    found = {path.stem: path for path in sorted(results.glob("*.json"))}
    order = [name for name in KNOWN if name in found]
    order += [name for name in found if name not in KNOWN]
    return [_read(name, json.loads(found[name].read_text())) for name in order]


def _read(name: str, report: Report) -> Section:
    section = Section(name=name, title=name.replace("_", " ").capitalize(), about="")
    section.environment = _environment(report)
    if name in KNOWN:
        section.title, section.about, fill, section.short = KNOWN[name]
        try:
            fill(section, report)
        except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
            section.findings = [
                f"This file has another form than expected ({type(error).__name__}: {error}); "
                "it is shown as it is."
            ]
            section.tables, section.short = [], False
    if not section.tables:
        section.tables = generic_tables(report)
    return section


def _environment(report: Any) -> dict[str, Any]:
    if not isinstance(report, dict):
        return {}
    own = report.get("environment") or report.get("machine")
    if own is None and isinstance(report.get("models"), list) and report["models"]:
        own = report["models"][0].get("environment")
    return dict(own) if isinstance(own, dict) else {}


def _demo(section: Section, report: Report) -> None:
    runs = report["runs"]
    rows = [
        ["training time", *(f"{r['seconds']:.1f} s ({r['ratio']:.2f}x)" for r in runs)],
        [
            f"time to {report['settings']['target']:.0%} test accuracy",
            *(seconds(r["seconds_to_target"]) for r in runs),
        ],
        ["final test accuracy", *(percent(r["final_accuracy"], 2) for r in runs)],
        ["mean part frozen", *(percent(r["mean_frozen"], 0) for r in runs)],
    ]
    section.tables = [
        Table(title="", columns=["", *(r["name"] for r in runs)], rows=rows, short=True)
    ]
    seen = report["hits"] + report["misses"]
    difference = report["largest_loss_difference"]
    section.findings = [
        f"{report['hits']:,} of {seen:,} samples came from the cache "
        f"({bytes_(report['bytes_on_disk'])}). "
        + (
            "The losses of the cached run equal those of the computed one to the bit."
            if difference == 0
            else f"The losses of the cached and the computed run differ by up to {difference:.2g}."
        ),
        "The third run follows the same frozen schedule, computes everything, and measures no "
        f"plasticity. Times are medians of {report['repeats']} repetitions.",
    ]


def _time_to_accuracy(section: Section, report: Report) -> None:
    rows = []
    for row in report["verdicts"]:
        met = row["measured"] >= row["target"]
        relaxed = row.get("relaxed")
        rows.append(
            [
                row["what"], f"at least {ratio(row['target'])}",
                ratio(row["measured"]) if row["measured"] else "not reached",
                "met" if met else "**missed**", ratio(relaxed), row["reached"],
            ]
        )  # fmt: skip
    section.tables.append(
        Table(
            title="Targets",
            columns=["what", "target", "measured", "", "to a relaxed metric", "reached"],
            rows=rows,
            short=True,
        )
    )
    for name, task in report["tasks"].items():
        if task.get("summary"):
            section.tables.append(_methods(name, task))
            section.findings += [f"{name}: {line}." for line in task.get("findings", [])]
    for name, sweep in report["sweeps"].items():
        if sweep.get("summary"):
            section.tables.append(_sweep(name, sweep))


def _methods(name: str, task: Report) -> Table:
    rows = []
    for method, row in task["summary"]["methods"].items():
        reach, final = row["time_to_strict"], row["final"]
        rows.append(
            [
                method, seconds(row["seconds"]["median"]), ratio(row["total_speedup"]["median"]),
                ratio(reach["speedup"]["median"]), f"{reach['reached']} of {len(row['seeds'])}",
                ratio(row["time_to_relaxed"]["speedup"]["median"]),
                f"{number(final['mean'], 4)} ± {number(final['std'], 2)}",
                percent(row["frozen_forward"], 0), percent(row["hit_rate"], 0),
                bytes_(row["bytes_on_disk"]),
            ]
        )  # fmt: skip
    stopped = task["summary"].get("plain_stopped")
    if stopped:
        final = stopped["final"]
        text = f"{number(final['mean'], 4)} ± {number(final['std'], 2)}"
        rows.append(["plain, stopped at egeria+cache's time", *["-"] * 5, text, "-", "-", "-"])
    columns = [
        "method", "time", "whole schedule", "to plain's metric", "seeds that reach it",
        "to a relaxed metric", f"final {task.get('metric', 'metric')}", "forward frozen", "hits",
        "disk",
    ]  # fmt: skip
    return Table(title=f"{name}: {task.get('title', '')}", columns=columns, rows=rows)


def _sweep(name: str, sweep: Report) -> Table:
    own = sweep["summary"]
    rows = [
        ["eight runs, uncached", seconds(own["uncached_s"]["median"]), "1.00x",
         number(own["best_uncached"]["median"], 4), "-"],
        ["eight runs, one cache", seconds(own["cached_s"]["median"]),
         ratio(own["speedup"]["median"]), number(own["best_cached"]["median"], 4),
         bytes_(own["bytes_on_disk"])],
    ]  # fmt: skip
    columns = ["", "time", "speed-up", "best metric", "disk"]
    return Table(title=f"{name}: {sweep.get('title', '')}", columns=columns, rows=rows)


def _forward_skip(section: Section, report: Report) -> None:
    cells = [(model, cell) for model in report["models"] for cell in model["cells"]]
    rows = {id(cell): _cell(model, cell) for model, cell in cells}
    columns = [
        "model (batch)", "boundary", "full step", "frozen", "hits", "oracle", "hits / oracle",
        "stored per sample (of its input)", "whole data set", "breaks even in epoch", "gate",
    ]  # fmt: skip
    middle = [
        min(model["cells"], key=lambda cell: abs(cell["share"] - 0.5))
        for model in report["models"]
        if model["cells"]
    ]
    section.tables = [
        Table(
            title="At about half of the layers",
            columns=columns,
            rows=[rows[id(cell)] for cell in middle],
            short=True,
        ),
        Table(title="All boundaries", columns=columns, rows=list(rows.values())),
    ]
    model, worst = max(cells, key=lambda pair: float(pair[1]["hit_vs_oracle"]))
    where = f"{model['model']} at {worst['boundary']}, the worst of {len(cells)}"
    section.findings.append(
        verdict("A step of hits against the oracle", worst["hit_vs_oracle"], most=1.05, where=where)
    )
    over = sum(cell["hit_vs_oracle"] > 1.05 for _, cell in cells)
    wrong = [f"{m['model']} at {c['boundary']}" for m, c in cells if not c["gate"]["right"]]
    named = f" (wrong: {', '.join(wrong)})" if wrong else ""
    section.findings.append(
        f"{len(cells) - over} of {len(cells)} cells are within 1.05x of the oracle; the gate was "
        f"right in {len(cells) - len(wrong)} of {len(cells)}{named}: "
        + ("met." if not wrong and not over else "**missed**.")
    )
    storage = [c["stored_vs_input"] for m, c in cells if m["model"] == "ResNet-50"]
    if storage:
        section.findings.append(
            verdict("ResNet-50's storage against its input", max(storage), most=5.3)
            + f" Least: {min(storage):.2f}x; the paper has 1.5-5.3x."
        )
    dates = sorted({str(m["environment"].get("date", ""))[:10] for m, _ in cells} - {""})
    if len(dates) > 1:
        section.environment["date"] = f"{dates[0]} to {dates[-1]}"


def _cell(model: Report, cell: Report) -> list[str]:
    epoch = cell["break_even_epoch"]
    return [
        f"{model['model']} ({model['batch_size']})", str(cell["boundary"]),
        seconds(cell["step_s"]["full"]), ratio(cell["frozen_vs_full"]), ratio(cell["hit_vs_full"]),
        ratio(cell["oracle_vs_full"]), ratio(cell["hit_vs_oracle"]),
        f"{bytes_(cell['stored_bytes'])} ({cell['stored_vs_input']:.2f}x)",
        bytes_(cell["data_set_bytes"]), "never" if epoch is None else number(epoch),
        ("skips" if cell["gate"]["skips"] else "computes")
        + (", right" if cell["gate"]["right"] else ", **wrong**"),
    ]  # fmt: skip


def _skip(section: Section, report: Report) -> None:
    rows = [
        [r["model"], r["boundary"], f"{r['oracle_ms']:.1f} ms", ratio(r["hit_vs_oracle"]),
         ratio(r["hit_vs_uncached"]), f"{number(r['guards_us'])} us"]
        for r in report["hits"]
    ]  # fmt: skip
    columns = ["model", "boundary", "oracle", "hits / oracle", "hits / computed", "guards"]
    section.tables = [Table(title="Steps of hits", columns=columns, rows=rows, short=True)]
    idle = [
        [r["model"], f"{r['step_ms']:.1f} ms", ratio(r["idle_vs_plain"]), f"{r['engine_us']} us"]
        for r in report["idle"]
    ]
    columns = ["model", "plain step", "with the engine idle", "the engine's own time"]
    section.tables.append(Table(title="Nothing to skip", columns=columns, rows=idle))
    worst = max(report["hits"], key=lambda r: float(r["hit_vs_oracle"]))
    where = f"{worst['model']} at {worst['boundary']}, the worst of {len(report['hits'])}"
    section.findings = [
        verdict("A step of hits against the oracle", worst["hit_vs_oracle"], most=1.05, where=where)
    ]


def _store(section: Section, report: Report) -> None:
    kinds = report["results"]
    contestants = list(
        dict.fromkeys(
            n for own in kinds.values() for n, one in own.items() if isinstance(one, dict)
        )
    )
    rows = []
    for name in contestants:
        cells = []
        for own in kinds.values():
            one = own.get(name)
            cells.append(
                "-" if not isinstance(one, dict) or "read_gb_per_s" not in one
                else f"{one['read_gb_per_s']:.2f} ({one['bytes_per_raw_byte']:.2f})"
            )  # fmt: skip
        rows.append([name, *cells])
    section.tables = [
        Table(
            title="Random batches read, GB/s (and bytes on disk per raw byte)",
            columns=["", *kinds], rows=rows, short=True,
        )
    ]  # fmt: skip
    for kind, own in kinds.items():
        rows = [
            [name, *(number(v) for k, v in one.items() if not isinstance(v, dict | list))]
            for name, one in own.items()
            if isinstance(one, dict)
        ]
        first = next(one for one in own.values() if isinstance(one, dict))
        names = [k for k, v in first.items() if not isinstance(v, dict | list)]
        columns = ["", *(name.replace("_", " ") for name in names)]
        section.tables.append(Table(title=kind, columns=columns, rows=rows))
    section.findings = [
        verdict(what, measured, least=least, where=where)
        for what, measured, least, where in _store_targets(kinds)
    ]


def _store_targets(kinds: Report) -> list[tuple[str, float, float, str]]:
    """Return (what, measured, target, where): the worst speed beside each of the obvious ways."""

    def worst(of: dict[str, float]) -> tuple[float, str]:
        kind = min(of, key=lambda name: of[name])
        return of[kind], kind if len(of) == 1 else f"{kind}, the worst of {len(of)}"

    def beside(name: str, field: str) -> dict[str, float]:
        return {kind: own[name][field] for kind, own in kinds.items() if name in own}

    asked = [
        ("raw, random reads against a bare LMDB copy loop",
         beside("LMDB copy loop", "raw_is_faster_by"), 0.8),
        ("auto, random reads against a loop of zstd frames",
         {kind: ratio for kind, ratio in beside("LMDB + zstd loop", "auto_is_faster_by").items()
          if kind == "post-ReLU float32"}, 1.2),
        ("raw, writes against bare LMDB commits",
         {kind: own["write_ratio_to_bare_lmdb"] for kind, own in kinds.items()}, 0.7),
        ("auto, random reads against Blosc2", beside("Blosc2", "auto_is_faster_by"), 1.0),
    ]  # fmt: skip
    found = []
    for what, of, target in asked:
        if of:
            measured, where = worst(of)
            found.append((what, measured, target, where))
    return found


def _loader(section: Section, report: Report) -> None:
    names = list(report["cheap"]["training"]) + [
        name for name in report["expensive"]["training"] if name not in report["cheap"]["training"]
    ]
    rows = []
    for name in names:
        row = [name]
        for kind in ("cheap", "expensive"):
            one = report[kind]["training"].get(name)
            row.append(
                "-" if one is None else f"{seconds(one['median_s'])} ({ratio(one['ratio'])})"
            )
        rows.append(row)
    costs = [f"{report[kind]['sample_us']:.0f} us a sample" for kind in ("cheap", "expensive")]
    section.tables = [
        Table(
            title="An epoch of training (against DataLoader in the same rounds)",
            columns=["", *costs], rows=rows, short=True,
        )
    ]  # fmt: skip
    for kind in ("cheap", "expensive"):
        loading = report[kind]["loading"]
        rows = [[n, seconds(one["median_s"]), ratio(one["ratio"])] for n, one in loading.items()]
        columns = ["", "time", "against DataLoader"]
        section.tables.append(
            Table(title=f"An epoch of loading alone, {kind} samples", columns=columns, rows=rows)
        )
    for kind in ("cheap", "expensive"):
        own = report[kind].get("parity", {}).get("training", {})
        if "EgeriaLoader, nothing frozen" in own:
            section.findings.append(
                verdict(
                    f"Nothing frozen, {kind} samples, against DataLoader",
                    own["EgeriaLoader, nothing frozen"]["ratio"], most=1.02,
                )
            )  # fmt: skip
    if report.get("skipped"):
        skipped = ", ".join(f"{name} ({why})" for name, why in report["skipped"].items())
        section.findings.append(f"Not measured: {skipped}.")


def _controller(section: Section, report: Report) -> None:
    rows = [
        [r["evaluator"], ", ".join(r["reference"]), str(r["evaluate_every"]),
         f"{r['train_step_ms']:.0f} ms", percent(r["mean_share"], 2), percent(r["worst_share"])]
        for r in report["step"]
    ]  # fmt: skip
    columns = [
        "evaluator", "reference", "every", "training step", "controller.step, mean", "worst",
    ]  # fmt: skip
    section.tables = [
        Table(title="Part of a training step", columns=columns, rows=rows, short=True)
    ]
    if report.get("slowdown"):
        rows = [
            [r["evaluator"], str(r["evaluate_every"]), ratio(r["slowdown"]), str(r["readings"]),
             str(r["dropped"])]
            for r in report["slowdown"]
        ]  # fmt: skip
        columns = ["evaluator", "every", "slower by", "readings", "dropped"]
        title = "Training on all cores with the evaluator at work beside it"
        section.tables.append(Table(title=title, columns=columns, rows=rows))
    rows = [
        [r["model"], r["reference"], f"{r['forward_ms']:.1f} ms", ratio(r["speedup"]),
         f"{r['build_s']:.2f} s", number(r["sp_to_fp32"])]
        for r in report["references"]
    ]  # fmt: skip
    columns = ["layer", "reference", "forward", "against fp32", "build", "SP to fp32"]
    section.tables.append(Table(title="References", columns=columns, rows=rows))
    paper = report.get("paper", {}).get("reference_overhead", 0.015)
    beside = [r for r in report["step"] if r["evaluator"] != "inline"]
    worst = max(beside, key=lambda r: float(r["mean_share"]))
    section.findings = [
        verdict(
            "Mean cost of controller.step beside the training thread",
            100 * worst["mean_share"], most=100 * paper, unit=" %",
            where=f"{worst['evaluator']}, {', '.join(worst['reference'])}",
        )
    ]  # fmt: skip


def _variants(section: Section, report: Report) -> None:
    rows = [
        [name, f"{percent(r['accuracy'])} ± {percent(r['accuracy_std'])}",
         f"{number(r['test_loss'])} ± {number(r['test_loss_std'], 2)}", bytes_(r["disk_bytes"]),
         percent(r["hit_rate"], 0), seconds(r["seconds"]), number(r["epochs_until_all_hits"])]
        for name, r in report["variants"].items()
    ]  # fmt: skip
    columns = [
        "versions", "test accuracy", "test loss", "disk", "hits", "frozen epochs",
        "epochs until all hit",
    ]  # fmt: skip
    section.tables = [Table(title="", columns=columns, rows=rows)]


def _sensitivity(section: Section, report: Report) -> None:
    rows = []
    for name, r in report["variants"].items():
        accuracy = r["accuracy"]
        spread = statistics.stdev(accuracy) if len(accuracy) > 1 else 0.0
        rows.append(
            [r["group"], name, f"{percent(statistics.mean(accuracy))} ± {percent(spread)}",
             percent(statistics.mean(r["mean_active"]), 0),
             number(statistics.mean(len(moves) for moves in r["moves"]), 2)]
        )  # fmt: skip
    columns = ["group", "variant", "test accuracy", "mean part trained", "moves"]
    section.tables = [Table(title="", columns=columns, rows=rows)]


def _plasticity(section: Section, report: Report) -> None:
    rows = []
    for layer, own in report["layers"].items():
        cost = own["cost"]
        for pair, values in own["spearman"].items():
            text = ", ".join(f"{value:.2f}" for value in values)
            rows.append([layer, pair, text, ratio(cost["pwcca_over_sp_same_rows"])])
    columns = ["layer", "pair", "Spearman per seed", "PWCCA's time / SP's, same rows"]
    section.tables = [Table(title="", columns=columns, rows=rows)]


KNOWN: dict[str, tuple[str, str, Callable[[Section, Report], None], bool]] = {
    "demo": (
        "The demo",
        "A ResNet on handwritten digits, trained three times with the same seeds and schedule.",
        _demo,
        True,
    ),
    "time_to_accuracy": (
        "Time to accuracy",
        "Real data, several seeds, one schedule for all. A speed-up is plain PyTorch's time to its "
        "own final metric (less one standard deviation over the seeds) over the method's; a seed "
        "in which a method never gets there counts as 0.",
        _time_to_accuracy,
        True,
    ),
    "forward_skip": (
        "What a skipped forward saves",
        "The paper's models at their real size, random weights, synthetic input. Times are parts "
        "of a full training step: the front frozen and computed, the front read from the cache "
        "(all hits), and the oracle, which trains the rest alone on activations in memory.",
        _forward_skip,
        True,
    ),
    "skip": (
        "The cost of a hit",
        "Small models; activations in memory, so that the engine's own cost shows.",
        _skip,
        True,
    ),
    "store": (
        "The store",
        "Random batches of activations, read and written beside other ways to keep them; the "
        "contestants take turns.",
        _store,
        True,
    ),
    "loader": (
        "The loader",
        "Beside its peers, in turns, with a data set that costs next to nothing and one that does "
        "not.",
        _loader,
        True,
    ),
    "controller": (
        "The controller",
        "What deciding costs the training thread, and how fast the references are.",
        _controller,
        True,
    ),
    "variants": (
        "Cached versions of each sample",
        "The front is frozen, the rest trains on with K cached versions of each augmented sample, "
        "and with fresh ones in every epoch.",
        _variants,
        False,
    ),
    "sensitivity": (
        "The controller's options",
        "Accuracy and the part of the model that is trained on average, per setting.",
        _sensitivity,
        False,
    ),
    "plasticity_validation": (
        "Plasticity against other measures",
        "Rank correlation over the epochs of SP plasticity with the distance to the final weights "
        "in PWCCA and CKA.",
        _plasticity,
        False,
    ),
}
