"""What the results of store, loader and skip are shown by."""

from __future__ import annotations

from .parts import (
    Report,
    Section,
    Table,
    as_fast,
    bytes_,
    number,
    percent,
    ratio,
    seconds,
    verdict,
)  # fmt: skip

__all__ = [
    "device", "forward_skip", "loader", "ragged", "short", "skip", "small_step", "store",
    "variants",
]  # fmt: skip


SMALL = {10: 1.25, 48: 1.10}
"""What a small step of hits may take, its oracle's time as 1, by the samples in it."""


def forward_skip(section: Section, report: Report) -> None:
    cells = [(model, cell) for model in report["models"] for cell in model["cells"]]
    rows = {id(cell): _cell(model, cell) for model, cell in cells}
    columns = [
        "model (batch)", "boundary", "full step", "frozen", "hits", "oracle", "hits vs oracle",
        "stored per sample (vs its input)", "whole data set", "breaks even in epoch", "gate",
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
        _beside("A step of hits vs oracle", worst["hit_vs_oracle"], 1.05, where)
    )
    over = sum(cell["hit_vs_oracle"] > 1.05 for _, cell in cells)
    wrong = [f"{m['model']} at {c['boundary']}" for m, c in cells if not c["gate"]["right"]]
    named = f" (wrong: {', '.join(wrong)})" if wrong else ""
    section.findings.append(
        f"{len(cells) - over} of {len(cells)} cells are at least {1 / 1.05:.2f}x as fast as the "
        f"oracle; the gate was right in {len(cells) - len(wrong)} of {len(cells)}{named}: "
        + ("met." if not wrong and not over else "**missed**.")
    )
    storage = [c["stored_vs_input"] for m, c in cells if m["model"] == "ResNet-50"]
    if storage:
        section.findings.append(
            verdict("ResNet-50's storage vs its input", max(storage), most=5.3, unit="")
            + f" Least: {min(storage):.2f}; the paper has 1.5-5.3."
        )
    dates = sorted({str(m["environment"].get("date", ""))[:10] for m, _ in cells} - {""})
    if len(dates) > 1:
        section.environment["date"] = f"{dates[0]} to {dates[-1]}"


def _cell(model: Report, cell: Report) -> list[str]:
    epoch = cell["break_even_epoch"]
    return [
        f"{model['model']} ({model['batch_size']})", str(cell["boundary"]),
        seconds(cell["step_s"]["full"]),
        *(as_fast(cell[f"{name}_vs_full"]) for name in ("frozen", "hit", "oracle")),
        as_fast(cell["hit_vs_oracle"]),
        f"{bytes_(cell['stored_bytes'])} ({cell['stored_vs_input']:.2f})",
        bytes_(cell["data_set_bytes"]), "never" if epoch is None else number(epoch),
        ("skips" if cell["gate"]["skips"] else "computes")
        + (", right" if cell["gate"]["right"] else ", **wrong**"),
    ]  # fmt: skip


def _beside(what: str, slower: float, most: float, where: str = "") -> str:
    """Return the verdict on a quotient of times that may be `most`."""
    return verdict(what, 1 / slower, least=1 / most, where=where)


def skip(section: Section, report: Report) -> None:
    rows = [
        [r["model"], r["boundary"], f"{r['oracle_ms']:.1f} ms", as_fast(r["hit_vs_oracle"]),
         as_fast(r["hit_vs_uncached"]), f"{number(r['guards_us'])} us"]
        for r in report["hits"]
    ]  # fmt: skip
    columns = ["model", "boundary", "oracle", "hits vs oracle", "vs computed", "guards"]
    section.tables = [Table(title="Steps of hits", columns=columns, rows=rows, short=True)]
    idle = [
        [r["model"], f"{r['step_ms']:.1f} ms", as_fast(r["idle_vs_plain"]), f"{r['engine_us']} us"]
        for r in report["idle"]
    ]
    columns = ["model", "plain step", "with the engine idle vs plain", "the engine's own time"]
    section.tables.append(Table(title="Nothing to skip", columns=columns, rows=idle))
    worst = max(report["hits"], key=lambda r: float(r["hit_vs_oracle"]))
    where = f"{worst['model']} at {worst['boundary']}, the worst of {len(report['hits'])}"
    section.findings = [_beside("A step of hits vs oracle", worst["hit_vs_oracle"], 1.05, where)]


def small_step(section: Section, report: Report) -> None:
    steps = report["steps"]
    rows = [
        [f"{one['batch_size']} samples", f"{one['oracle_ms']:.1f} ms",
         as_fast(one["hit_vs_oracle"]), as_fast(one["read_already_vs_oracle"]),
         f"{one['hit_us']:.0f} us", as_fast(one["hit_work_vs_oracle"])]
        for one in steps
    ]  # fmt: skip
    columns = ["batch", "oracle", "hits vs oracle", "hits read before", "beyond the oracle",
               "hits, by processor time"]  # fmt: skip
    section.tables = [Table(title="Small steps", columns=columns, rows=rows, short=True)]
    parts = list(dict.fromkeys(name for one in steps for name in one["us_by_part"]))
    rows = [[name, *(number(one["us_by_part"].get(name)) for one in steps)] for name in parts]
    columns = ["part", *(f"{one['batch_size']} samples, us" for one in steps)]
    title = "Where a step of hits goes"
    section.tables.append(Table(title=title, columns=columns, rows=rows, short=True))
    section.findings = [
        _beside(f"A step of hits vs oracle's {one['oracle_ms']:.1f} ms", one["hit_vs_oracle"],
                SMALL.get(one["batch_size"], 1.05))
        for one in steps
    ]  # fmt: skip


def device(section: Section, report: Report) -> None:
    waits = {one["model"]: one for one in report["waits"]}
    rows = [
        [f"{one['model']} ({one['batch']})", f"{one['computed_ms']:.1f} ms",
         f"{one['oracle_ms']:.1f} ms", as_fast(one["hit_vs_oracle"]), ratio(one["hit_vs_computed"]),
         *(number(waits.get(one["model"], {}).get(kind)) for kind in ("computed", "hits"))]
        for one in report["steps"]
    ]  # fmt: skip
    columns = ["model (batch)", "computed", "oracle", "hits vs oracle", "hits vs computed",
               "waits in an epoch, computed", "of hits"]  # fmt: skip
    title = f"Steps on {report['environment']['gpu'] or 'the CPU'}, {report['size']}"
    section.tables = [Table(title=title, columns=columns, rows=rows)]
    rows = [
        [f"{one['model']}, {one['way']}", f"{one['hits']} of {one['of']}",
         number(one["largest_difference"])]
        for one in report["right"]
    ]  # fmt: skip
    columns = ["", "hits", "largest relative difference of a loss"]
    section.tables.append(Table(title="With the cache and without", columns=columns, rows=rows))
    graph = {None: "not tried", True: "right", False: "**wrong**"}
    section.findings = [
        f"{len(report['right']) - report['wrong']} of {len(report['right'])} runs are right; a "
        f"gather in a graph: {graph[report['graph_of_a_gather_is_right']]}.",
        *[f"{number(gb)} GB/s to the device." for gb in [report["to_device_gb_per_s"]] if gb],
    ]


def short(section: Section, report: Report) -> None:
    trainings, ways = report["trainings"], ("cold", "warm")
    rows = [
        [one["training"], f"{one['plain_s']:.2f} s",
         *(as_fast(one[f"{way}_vs_plain"]) for way in ways),
         *(f"{one[f'{way}_said_s']:.2f} of {one[f'{way}_saved_s']:.2f} s" for way in ways)]
        for one in trainings
    ]  # fmt: skip
    columns = ["training", "plain", "from an empty directory", "from a filled one",
               "said to be saved, empty", "said to be saved, filled"]  # fmt: skip
    section.tables = [Table(title="Processor time", columns=columns, rows=rows, short=True)]
    section.findings = [
        _beside(f"{one['training']}: from an empty directory", one["cold_vs_plain"], 1.05)
        for one in trainings
    ]


def store(section: Section, report: Report) -> None:
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
    if cold := report.get("cold_gb_per_s"):
        names = next(iter(cold.values()))
        section.tables.append(
            Table(
                title="The same with nothing in memory, each batch the first after opening, GB/s",
                columns=["", *cold], short=True,
                rows=[[name, *(f"{own[name]:.2f}" for own in cold.values())] for name in names],
            )
        )  # fmt: skip
    if small := report.get("small"):
        rows = [[name, *map(ratio, one.values())] for name, one in small.items()]
        columns = ["", "file", "without free pages"]
        title = "Bytes on disk of small rows, beside their records"
        section.tables.append(Table(title=title, columns=columns, short=True, rows=rows))
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
        for what, measured, least, where in _store_targets(kinds, report.get("cold_gb_per_s", {}))
    ]
    if small:
        name = max(small, key=lambda one: small[one]["file"])
        where = f"{name}, the worst of {len(small)}; {small[name]['without free pages']:.2f} "
        section.findings += [
            verdict("Small rows on disk, beside their records", small[name]["file"], most=1.5,
                    where=where + "without the pages that wait to be used again"),
            verdict(f"Opening {report['open']['samples']:,} samples", report["open"]["open_s"],
                    most=0.2, unit=" s"),
            verdict("Memory of that, a sample", report["open"]["memory_bytes_a_sample"], most=1.0,
                    unit=" bytes"),
        ]  # fmt: skip


BOUNDS = {
    "np.take after LMDB look-ups": "np_take_of_what_was_looked_up",
    "LMDB that hashes what it commits": "write_ratio_of_hashed_lmdb",
}
"""What is possible where rows have names, or checksums, and the field that holds it."""


def _store_targets(kinds: Report, cold: Report) -> list[tuple[str, float, float, str]]:
    """Return (what, measured, target, where): the worst speed beside each of the obvious ways."""

    def worst(of: dict[str, float], bound: str) -> tuple[float, str]:
        kind = min(of, key=lambda name: of[name])
        where = kind if len(of) == 1 else f"{kind}, the worst of {len(of)}"
        possible = kinds[kind].get(BOUNDS.get(bound, ""))
        return of[kind], where + (f"; {bound}: {possible:.2f}x" if possible else "")

    def beside(name: str, field: str) -> dict[str, float]:
        return {kind: own[name][field] for kind, own in kinds.items() if name in own}

    asked = [
        ("raw, random reads against np.take on a memmap",
         beside("np.take on a memmap", "raw_is_faster_by"), 0.8, "np.take after LMDB look-ups"),
        ("raw, random reads against tensordict",
         beside("tensordict memmap", "raw_is_faster_by"), 2.0, ""),
        ("raw, random reads against safetensors",
         beside("safetensors", "raw_is_faster_by"), 2.0, ""),
        ("raw, every read verified, against an LMDB copy loop with the same hash",
         beside("LMDB copy + hash loop", "raw_is_faster_by"), 0.9, ""),
        ("auto, random reads against a loop of zstd frames",
         beside("LMDB + zstd loop", "auto_is_faster_by"), 2.0, ""),
        ("auto, random reads against Blosc2", beside("Blosc2", "auto_is_faster_by"), 1.0, ""),
        ("raw, durable writes against bare LMDB commits",
         {kind: own["write_ratio_to_bare_lmdb"] for kind, own in kinds.items()}, 0.9,
         "LMDB that hashes what it commits"),
        ("raw, first batch with nothing in memory against 16 threads of pread",
         {kind: own["egeria raw"] / own["pread, 16 threads"] for kind, own in cold.items()}, 0.9,
         ""),
    ]  # fmt: skip
    found = []
    for what, of, target, bound in asked:
        if of:
            measured, where = worst(of, bound)
            found.append((what, measured, target, where))
    return found


def ragged(section: Section, report: Report) -> None:
    rows = [
        [str(r["width"]), str(r["layers"]), r["batches"], seconds(r["oracle_s"]),
         as_fast(r["hits_vs_oracle"])]
        for r in report["epochs"]
    ]  # fmt: skip
    columns = ["width", "layers", "batches", "oracle", "hits vs oracle"]
    section.tables = [Table(title="Epochs of hits", columns=columns, rows=rows)]
    rows = [
        [str(r["width"]), number(r["own_bytes"]), number(r["maximum_bytes"]), ratio(r["saved"])]
        for r in report["stored"]
    ]
    columns = ["width", "bytes a sample", "padded to the longest", "as small"]
    section.tables.append(Table(title="Bytes", columns=columns, rows=rows))
    worst = max(report["epochs"], key=lambda r: float(r["hits_vs_oracle"]))
    where = f"{worst['width']} wide, {worst['batches']}, the worst of {len(report['epochs'])}"
    section.findings = [_beside("An epoch of hits vs oracle", worst["hits_vs_oracle"], 1.05, where)]


def loader(section: Section, report: Report) -> None:
    names = list(report["cheap"]["training"]) + [
        name for name in report["expensive"]["training"] if name not in report["cheap"]["training"]
    ]
    rows = []
    for name in names:
        row = [name]
        for kind in ("cheap", "expensive"):
            one = report[kind]["training"].get(name)
            row.append(
                "-" if one is None else f"{seconds(one['median_s'])} ({as_fast(one['ratio'])})"
            )
        rows.append(row)
    costs = [f"{report[kind]['sample_us']:.0f} us a sample" for kind in ("cheap", "expensive")]
    section.tables = [
        Table(
            title="An epoch of training (vs DataLoader in the same rounds)",
            columns=["", *costs], rows=rows, short=True,
        )
    ]  # fmt: skip
    for kind in ("cheap", "expensive"):
        loading = report[kind]["loading"]
        rows = [[n, seconds(one["median_s"]), as_fast(one["ratio"])] for n, one in loading.items()]
        columns = ["", "time", "vs DataLoader"]
        section.tables.append(
            Table(title=f"An epoch of loading alone, {kind} samples", columns=columns, rows=rows)
        )
    for kind in ("cheap", "expensive"):
        own = report[kind].get("parity", {}).get("training", {})
        if "EgeriaLoader, nothing frozen" in own:
            section.findings.append(
                _beside(
                    f"Nothing frozen, {kind} samples, vs DataLoader",
                    own["EgeriaLoader, nothing frozen"]["ratio"], 1.02,
                )
            )  # fmt: skip
    if report.get("skipped"):
        skipped = ", ".join(f"{name} ({why})" for name, why in report["skipped"].items())
        section.findings.append(f"Not measured: {skipped}.")


def variants(section: Section, report: Report) -> None:
    columns = [
        "draws", "test accuracy", "training loss", "hits", "of the second epoch",
        "as fast, by the processor", "in a later epoch",
    ]  # fmt: skip
    for task, arms in report["tasks"].items():
        rows = [
            [name, f"{percent(r['accuracy'])} ± {percent(r['accuracy_std'])}",
             number(r["train_loss"]), percent(r["hits"], 0), percent(r["hits_of_second_epoch"], 0),
             as_fast(r["time_ratio"]), as_fast(r["later_ratio"])]
            for name, r in arms.items()
        ]  # fmt: skip
        section.tables.append(Table(title=task, columns=columns, rows=rows))
    rows = [
        [name, percent(r["share"], 0), f"{r['plain_ms']:.0f} ms", f"{r['cache_ms']:.0f} ms",
         as_fast(r["vs_by_hand"]), as_fast(r["later_ratio"]), as_fast(r["time_ratio"]),
         as_fast((1 + (r["epochs"] - 1) * r["by_hand_ms"] / r["plain_ms"]) / r["epochs"])]
        for name, r in report.get("speed", {}).items()
    ]  # fmt: skip
    if rows:
        columns = [
            "model", "front's share of a step", "plain step", "later step with a cache",
            "as fast as fresh rows by hand", "as plain", "whole run", "whole run by hand",
        ]  # fmt: skip
        section.tables.append(Table(title="Larger models", columns=columns, rows=rows))
    section.findings = [
        f"{task}: {best} takes least time of what is served from the second epoch on and within a "
        "deviation of fresh draws."
        for task, best in report["fastest"].items()
    ]
