"""What the evidence for the harm budget is shown by."""

from __future__ import annotations

from typing import Any

from .parts import Report, Section, Table, number, percent

__all__ = ["harm", "scripts"]

COLUMNS = [
    "", "branches", "of them harmful", "area under the ROC curve", "rank correlation",
    "predicted / measured, median", "95 %", "allowed by the rule", "worst of those, nats",
]  # fmt: skip


def harm(section: Section, report: Report) -> None:
    summary = report["summary"]
    rows = [
        _row(f"{half}: {NAMES[measure]}", figures)
        for half, own in summary["halves"].items()
        for measure, figures in own.items()
    ]
    section.tables.append(Table(title="Both halves", columns=COLUMNS, rows=rows, short=True))
    for kind, groups in summary["fresh"].items():
        rows = [_row(name, own["tail"]) for name, own in groups.items()]
        title = f"Fresh half, final training loss, by {kind}"
        section.tables.append(Table(title=title, columns=COLUMNS, rows=rows))
    for half, own in summary["halves"].items():
        near = own["tail"]["near"]
        section.findings.append(
            f"{half} half, where all layers rest and at most 0.05 is predicted, which is what the "
            f"rule chooses from: {near['count']} branches; of the {near['telling']} that lose more "
            f"than 0.003 nats of training loss the median of predicted over measured is "
            f"{number(near['ratio'])}, and {near['within_two']} are within a factor of two."
        )
    default = [r for r in report["policy"] if r["setting"] == "default"]
    if default:
        worst = max(default, key=lambda r: r["harm"]["tail"])
        moved = sum(r["unfrozen"] for r in report["policy"])
        section.findings.append(
            f"{len(default)} runs with the defaults: the worst loses "
            f"{_nats(worst['harm']['tail'])} nats of training loss "
            f"({worst['task']}, seed {worst['seed']}); "
            f"{percent(sum(r['saved'] for r in default) / len(default), 0)} of the steps' cost are "
            f"saved on average; layers were unfrozen in {moved} cases."
        )
    rows = [
        [
            f"{r['task']} {r['seed']}", r["setting"], _nats(r["predicted"]), _nats(r["budget"]),
            _nats(r["harm"]["tail"]), _nats(r["harm"]["valid"]),
            f"{100 * r['harm']['accuracy']:+.1f}", percent(r["saved"], 0), str(len(r["moves"])),
        ]
        for r in report["policy"]
    ]  # fmt: skip
    columns = [
        "run", "setting", "predicted", "budget", "harm, training loss", "harm, validation loss",
        "accuracy, points", "saved of all steps", "moves",
    ]  # fmt: skip
    section.tables.append(Table(title="Runs under the policy", columns=columns, rows=rows))


def scripts(section: Section, report: Report) -> None:
    """Show the mean harm of each script, and what is missed."""
    rows, missed = [], []
    for row in report["scripts"]:
        harms = [f"{row[p]:+.4f} ± {row[f'{p}_error']:.4f}" for p in ("train", "test")]
        if row["told"] == "chance":
            rows.append([row["script"], row["told"], *harms, "", "", "", ""])
            continue
        rows.append(
            [
                row["script"], row["told"], *harms, _nats(row["predicted"]), str(row["frozen"]),
                percent(row["saved"], 0), "**missed**" if row["missed"] else "within",
            ]
        )  # fmt: skip
        if row["missed"]:
            missed.append(f"{row['script']} ({row['told']})")
    columns = [
        "script", "told", "harm, training loss", "harm, test loss", "predicted", "seeds that froze",
        "saved of all steps", "budget",
    ]  # fmt: skip
    section.tables.append(Table(title="Five seeds each", columns=columns, rows=rows))
    told = (
        f"{len(missed)} of {sum(r['told'] != 'chance' for r in report['scripts'])} rows lose more"
    )
    section.findings.append(
        f"{told} than the budget of {report['budget']} in the mean of the seeds"
        + (f", **missed**: {'; '.join(missed)}." if missed else ".")
    )


NAMES = {"tail": "final training loss", "valid": "final validation loss"}


def _row(name: str, figures: dict[str, Any]) -> list[str]:
    low_high = figures["ratio_95"]
    return [
        name, str(figures["count"]), str(figures["harmful"]), number(figures["area"]),
        number(figures["correlation"]), number(figures["ratio"]),
        "-" if low_high is None else f"{low_high[0]:.2f} to {low_high[1]:.2f}",
        str(figures["allowed"]), _nats(figures["worst_allowed"]),
    ]  # fmt: skip


def _nats(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
