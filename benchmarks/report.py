"""Rows to read and lines of JSON to keep."""

from __future__ import annotations

import json
from pathlib import Path

from accuracy import CONTRACT


def append_json(path: Path, records: list[dict]) -> None:
    with path.open("a") as file:
        for record in records:
            file.write(json.dumps(record) + "\n")


def print_environment(environment: dict) -> None:
    cuda = f", CUDA {environment['cuda']}" if environment["cuda"] else ""
    load = "" if environment["load"] is None else f", load {environment['load']}"
    print(
        f"{environment['device']}: {environment['threads']} threads, torch {environment['torch']}{cuda}, "
        f"attn-qat {environment['commit']}, {environment['date']}{load}"
    )


def print_table(records: list[dict]) -> None:
    """All records of one operator on one case."""
    first = records[0]
    causal = ", causal" if first["causal"] else ""
    shape = ",".join(map(str, first["shape"]))
    print(f"\n{first['op']}  {first['case']} ({shape}{causal})  {first['dtype']}  inputs: {first['inputs']}")
    measured = [r for r in records if "not_run" not in r]
    if measured:
        _print_aligned([_header(measured), *(_row(r, measured) for r in measured)])
        _print_where_errors_come_from(measured)
    for reason in dict.fromkeys(r["not_run"] for r in records if "not_run" in r):
        names = dict.fromkeys(r["impl"] for r in records if r.get("not_run") == reason)
        print(f"not run, since it {reason}: {', '.join(names)}")


def print_legend() -> None:
    print(
        "\ncomputes: what it claims to compute. median: time of a call. spread: half the interquartile range."
        "\nerror: largest relative Frobenius error of its outputs against the float64 reference of what it"
        f"\ncomputes, measured before timing; attn_qat promises {CONTRACT:g}."
    )


def _print_where_errors_come_from(records: list[dict]) -> None:
    checked = [r for r in records if r["error"] is not None]
    if not checked:
        return
    record = checked[0]
    batch, heads, seq, _ = record["shape"]
    length = record["error_seq"]
    reduced = "" if length == seq else f", at the reduced length {length} on other inputs"
    print(f"error: of {record['error_heads']} of {batch * heads} heads{reduced}")


def _header(records: list[dict]) -> list[str]:
    rate = "TFLOP/s" if records[0]["tflops"] is not None else "GB/s"
    header = ["impl", "computes", "median", "spread", rate, f"time / {records[0]['impl']}", "error"]
    return header + (["saved", "peak memory"] if "peak_bytes" in records[0] else [])


def _row(record: dict, records: list[dict]) -> list[str]:
    rate = record["tflops"] if record["tflops"] is not None else record["gbs"]
    row = [
        record["impl"],
        record["computes"],
        _time(record["median_s"]),
        f"±{100 * record['spread']:.1f}%",
        f"{rate:.3g}" if rate < 100 else f"{rate:.0f}",
        f"{record['ratio']:.2f}",
        _error(record),
    ]
    sizes = [_size(record[key]) for key in ("saved_bytes", "peak_bytes") if key in record]
    return row + sizes


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds / 1e-6:.4g} us"


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


def _error(record: dict) -> str:
    if record["error"] is None:
        return "-"
    worst = max(record["error"], key=lambda name: record["error"][name])
    return f"{record['error'][worst]:.1e} ({worst})"


def _print_aligned(rows: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        names, numbers = zip(row[:2], widths[:2], strict=True), zip(row[2:], widths[2:], strict=True)
        cells = [cell.ljust(width) for cell, width in names] + [cell.rjust(width) for cell, width in numbers]
        print("  ".join(cells).rstrip())
