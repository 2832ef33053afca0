"""What the results of pipelines are shown by."""

from __future__ import annotations

from .parts import Report, Section, Table, number, verdict

__all__ = ["pipeline"]


def pipeline(section: Section, report: Report) -> None:
    schedules = list(report["units"])
    rows = [
        [found[0]["layout"], number(found[0]["paper"]), *(number(one["measured"]) for one in found)]
        for found in zip(*report["units"].values(), strict=True)
    ]
    columns = ["", "on paper", *schedules]
    section.tables = [Table(title="Units a batch", columns=columns, rows=rows)]
    rows = [
        [found[0]["layout"], number(found[0]["bubbles"]), number(found[0]["all_idle"])]
        for found in zip(*report["units"].values(), strict=True)
    ]
    columns = ["", "bubbles", "all idle units"]
    section.tables.append(Table(title="Idle units on paper", columns=columns, rows=rows))
    name, worst = max(
        ((name, one) for name, own in report["units"].items() for one in own),
        key=lambda pair: float(pair[1]["off"]),
    )
    section.findings = [
        verdict(
            "Units measured, off those on paper", 100 * worst["off"], most=10, unit=" %",
            where=f"{name}, {worst['layout']}, the worst of {len(schedules) * len(rows)}",
        )
    ]  # fmt: skip
