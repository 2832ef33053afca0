"""Tables from a results file of any form."""

from __future__ import annotations

from typing import Any

from .parts import Table, number

__all__ = ["generic_tables"]

SKIPPED = frozenset({"environment", "machine"})
MOST_ROWS = 200
LONGEST = 80


def generic_tables(report: Any) -> list[Table]:
    """Return a table per list or mapping of records, and one of all single values."""
    if not isinstance(report, dict):
        report = {"values": report}
    tables: list[Table] = []
    single: list[list[str]] = []
    for key, value in report.items():
        if key in SKIPPED:
            continue
        records = _records(value)
        if records is not None:
            tables.append(_table(key, records))
        elif isinstance(value, dict) and any(_records(item) for item in value.values()):
            for inner, item in value.items():
                own = _records(item)
                if own is not None:
                    tables.append(_table(f"{key}: {inner}", own))
                else:
                    single.append([f"{key}, {inner}", _text(item)])
        elif isinstance(value, dict):
            single += [[f"{key}, {inner}", _text(item)] for inner, item in value.items()]
        else:
            single.append([key, _text(value)])
    if single:
        tables.insert(0, Table(title="", columns=["", ""], rows=single))
    return tables


def _records(value: Any) -> list[tuple[str, dict[str, Any]]] | None:
    """Return (name, fields) of each record; None if the value holds no records."""
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return [("", item) for item in value]
    if isinstance(value, dict) and value and all(isinstance(i, dict) for i in value.values()):
        return list(value.items())
    return None


def _table(title: str, records: list[tuple[str, dict[str, Any]]]) -> Table:
    flat = [(name, _flat(fields)) for name, fields in records[:MOST_ROWS]]
    keys = list(dict.fromkeys(key for _, fields in flat for key in fields))
    named = any(name for name, _ in flat)
    columns = [key.replace("_", " ") for key in keys]
    rows = [[_text(fields.get(key)) for key in keys] for _, fields in flat]
    if named:
        columns = ["", *columns]
        rows = [[name, *row] for (name, _), row in zip(flat, rows, strict=True)]
    return Table(title=title.replace("_", " "), columns=columns, rows=rows)


def _flat(fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in fields.items():
        if isinstance(value, dict):
            result |= _flat(value, f"{prefix}{key} ")
        else:
            result[f"{prefix}{key}"] = value
    return result


def _text(value: Any) -> str:
    if isinstance(value, list | tuple | dict):
        text = ", ".join(map(_text, value)) if not isinstance(value, dict) else str(value)
        return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
    return number(value)
