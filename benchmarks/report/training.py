"""What the results of whole runs, and of the controller, are shown by."""

from __future__ import annotations

import statistics

from .parts import Report, Section, Table, as_fast, bytes_, number, percent, ratio, seconds, verdict

__all__ = ["controller", "demo", "plasticity_validation", "sensitivity", "time_to_accuracy"]


def demo(section: Section, report: Report) -> None:
    rows = [
        [act["title"], f"{act['plain_s']:.1f} s", f"{act['egeria_s']:.1f} s", ratio(act["speedup"]),
         f"{percent(act['plain_accuracy'])}, {percent(act['egeria_accuracy'])}",
         percent(act["hits"] / act["samples"], 0), bytes_(act["bytes_on_disk"])]
        for act in report["acts"]
    ]  # fmt: skip
    columns = ["", "plain", "Egeria", "as fast", "accuracy", "from the cache", "disk"]
    section.tables = [Table(title="", columns=columns, rows=rows, short=True)]
    tuned = [act for act in report["acts"] if "largest_loss_difference" in act]
    largest = max((act["largest_loss_difference"] for act in tuned), default=0.0)
    section.findings = [
        "Over a frozen front every loss of the runs with Egeria is that of plain PyTorch"
        + (" to the bit." if largest == 0 else f" within {largest:.1g}."),
        *(
            f"{act['title']}: predicted cost {act['predicted_cost']:.4f} nats, measured "
            f"{act['measured_cost']:+.4f}."
            for act in report["acts"]
            if "predicted_cost" in act
        ),
        f"The runs of an act take turns; of {report['repeats']} repetitions each act's median is "
        "shown.",
    ]


def time_to_accuracy(section: Section, report: Report) -> None:
    rows = []
    for row in report["verdicts"]:
        met = row["measured"] >= row["target"]
        rows.append(
            [
                row["what"], f"at least {ratio(row['target'])}", _reached(row["measured"]),
                "met" if met else "**missed**", _reached(row.get("clock")),
                _reached(row.get("per_seed", row["measured"])), row["reached"],
                _deviations(row.get("deviations_worse")), _reached(row.get("cut_short")),
                _deviations(row.get("cut_short_deviations_worse")),
            ]
        )  # fmt: skip
    section.tables.append(
        Table(
            title="Targets",
            columns=[
                "what", "target", "measured", "", "by the clock", "median over seeds",
                "seeds that get there", "ends worse by (deviations)",
                "plain cut to the same time", "which ends worse by",
            ],
            rows=rows,
            short=True,
        )
    )  # fmt: skip
    for name, task in report["tasks"].items():
        suggestion = task.get("suggestion")
        if suggestion:
            section.findings.append(f"{name}: {suggestion['text'].splitlines()[-1]}.")
        if task.get("summary"):
            section.tables.append(_methods(name, task))
            section.findings += [f"{name}: {line}." for line in task.get("findings", [])]
    for name, sweep in report["sweeps"].items():
        if sweep.get("summary"):
            section.tables.append(_sweep(name, sweep))


def _reached(value: float | None) -> str:
    """Return a speed-up to a metric; nought means that it was never reached."""
    return "-" if value is None else ratio(value) if value else "not reached"


def _pooled(reach: Report) -> str:
    return _reached(reach.get("pooled", reach["speedup"]["median"]))


def _deviations(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1f}"


def _methods(name: str, task: Report) -> Table:
    rows = []
    for method, row in task["summary"]["methods"].items():
        reach = row.get("processor_to_strict", row["time_to_strict"])
        relaxed = row.get("processor_to_relaxed", row["time_to_relaxed"])
        final, whole = row["final"], row.get("total_cpu_speedup", row["total_speedup"])
        rows.append(
            [
                method, seconds(row["seconds"]["median"]), ratio(whole["median"]),
                _pooled(reach), f"{reach['reached']} of {len(row['seeds'])}",
                _pooled(relaxed),
                f"{number(final['mean'], 4)} ± {number(final['std'], 2)}",
                _deviations(row.get("deviations_worse")),
                percent(row["frozen_forward"], 0), percent(row["hit_rate"], 0),
                bytes_(row["bytes_on_disk"]),
            ]
        )  # fmt: skip
    stopped = task["summary"].get("plain_stopped")
    if stopped:
        final = stopped["final"]
        text = f"{number(final['mean'], 4)} ± {number(final['std'], 2)}"
        what = f"plain, stopped at {stopped.get('at', 'egeria+cache')}'s time"
        rows.append([what, *["-"] * 5, text, "-", "-", "-", "-"])
    columns = [
        "method", "by the clock", "whole schedule", "to plain's metric", "seeds that get there",
        "to a relaxed metric", f"final {task.get('metric', 'metric')}", "deviations worse",
        "forward frozen", "hits", "disk",
    ]  # fmt: skip
    return Table(title=_title(name, task), columns=columns, rows=rows)


def _sweep(name: str, sweep: Report) -> Table:
    own, settings = sweep["summary"], sweep.get("settings", {})
    is_kept = settings.get("reuse", 1) is None
    kept = f" of {settings['variants']} draws a sample" if is_kept else ""
    rows = [
        ["eight runs, uncached", seconds(own["uncached_s"]["median"]), "1.00x",
         number(own["best_uncached"]["median"], 4), "-"],
        [f"eight runs, one cache{kept}", seconds(own["cached_s"]["median"]),
         ratio(own["speedup"]["median"]), number(own["best_cached"]["median"], 4),
         bytes_(own["bytes_on_disk"])],
    ]  # fmt: skip
    columns = ["", "time", "as fast", "best metric", "disk"]
    return Table(title=_title(name, sweep), columns=columns, rows=rows)


def _title(name: str, measured: Report) -> str:
    own = measured.get("environment")
    when = f", {own['date']}, {own['cpu']}" if own else ""
    return f"{name}: {measured.get('title', '')}{when}"


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
            [r["evaluator"], str(r["evaluate_every"]), as_fast(r["slowdown"]), str(r["readings"]),
             str(r["dropped"])]
            for r in report["slowdown"]
        ]  # fmt: skip
        columns = ["evaluator", "every", "as fast", "readings", "dropped"]
        title = "Training on all cores with the evaluator at work beside it"
        section.tables.append(Table(title=title, columns=columns, rows=rows))
    rows = [
        [r["model"], r["reference"], f"{r['forward_ms']:.1f} ms", ratio(r["speedup"]),
         f"{r['build_s']:.2f} s", number(r["sp_to_fp32"])]
        for r in report["references"]
    ]  # fmt: skip
    columns = ["layer", "reference", "forward", "vs fp32", "build", "SP to fp32"]
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
    columns = ["layer", "pair", "Spearman per seed", "SP vs PWCCA, same rows"]
    section.tables = [Table(title="", columns=columns, rows=rows)]
