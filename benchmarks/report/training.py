"""What the results of whole runs, and of the controller, are shown by."""

from __future__ import annotations

import statistics

from .parts import Report, Section, Table, bytes_, number, percent, ratio, seconds, verdict

__all__ = ["controller", "demo", "plasticity_validation", "sensitivity", "time_to_accuracy"]


def demo(section: Section, report: Report) -> None:
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


def time_to_accuracy(section: Section, report: Report) -> None:
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


def controller(section: Section, report: Report) -> None:
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


def sensitivity(section: Section, report: Report) -> None:
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


def plasticity_validation(section: Section, report: Report) -> None:
    rows = []
    for layer, own in report["layers"].items():
        cost = own["cost"]
        for pair, values in own["spearman"].items():
            text = ", ".join(f"{value:.2f}" for value in values)
            rows.append([layer, pair, text, ratio(cost["pwcca_over_sp_same_rows"])])
    columns = ["layer", "pair", "Spearman per seed", "PWCCA's time / SP's, same rows"]
    section.tables = [Table(title="", columns=columns, rows=rows)]
