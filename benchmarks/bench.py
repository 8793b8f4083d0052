"""Times attention for quantisation-aware training beside its alternatives, after checking each result.

    python benchmarks/bench.py --op forward_backward --case cpu_2k --impl attn_qat,eager,sdpa --json out.jsonl
    python benchmarks/bench.py --op backward --case 1,16,16384,128,causal --device cuda --impl all
    python benchmarks/bench.py --list

All implementations of a run get the same tensors and take turns. TFLOP/s are counted operations (flops.py)
over the median time; times are also given as ratios to the first implementation. --json appends one object a
line for each row:

    date commit device clocks threads torch cuda instruction_sets load   where and when
    op case shape causal dtype inputs seconds cuda_graph                 what was run
    impl version computes                                                by what, computing what
    median_s spread fastest_s samples tflops gbs ratio                   time; ratio to the first one
    error error_seq error_heads                                          by output; where it was measured
    saved_bytes peak_bytes                                               with --memory, see memory.py
    not_run                                                              instead of the last three: why not
"""

from __future__ import annotations

import argparse
import gc
import sys
from dataclasses import dataclass
from pathlib import Path

import accuracy
import environment
import memory
import report
import timing
import torch
from accuracy import CONTRACT
from cases import CASES, parse_case
from flops import counted_bytes, counted_flops
from peers import PEERS, Peer
from problem import ATTENTION, OUTPUTS, Problem

RECIPES = ("cudnn", "fp4", "fp4_qk")
INPUTS = ("random", "quantized")


@dataclass
class Entry:
    """One row: an implementation on a problem."""

    peer: Peer
    problem: Problem

    @property
    def computes(self) -> str:
        if self.problem.op not in ATTENTION:
            return "nvfp4" if "quantize" in self.problem.op and self.peer.computes is None else "plain"
        return self.peer.computes or self.problem.recipe

    @property
    def label(self) -> str:
        return f"{self.peer.name}/{self.computes}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], epilog="Cases: --list")
    add = parser.add_argument
    add("--op", default="forward_backward", help=f"comma-separated: {', '.join(OUTPUTS)}")
    add("--case", action="append", help="a named case or B,H,S,D[,causal]; may be repeated")
    add(
        "--impl",
        default="attn_qat,eager,sdpa",
        help="comma-separated names or all; the first is the yardstick",
    )
    add("--recipe", default="fp4", help=f"comma-separated, for those that take one: {', '.join(RECIPES)}")
    add("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    add("--device", default="cpu", help="cpu, cuda or cuda:N")
    add("--inputs", default="random", choices=INPUTS, help="quantized: q, k, v are numbers that NVFP4 holds")
    add("--threads", type=int, help="CPU threads (default: torch's)")
    add("--seconds", type=float, default=5.0, help="time to spend on each implementation (default 5)")
    add("--memory", action="store_true", help="also measure peak memory")
    add("--cuda-graph", action="store_true", help="replay each call from a CUDA graph")
    add("--no-check", action="store_true", help="leave the correctness column out")
    add("--json", type=Path, help="file to append records to")
    add("--list", action="store_true", help="list cases and implementations, and stop")
    options = parser.parse_args()
    options.op, options.recipe = options.op.split(","), options.recipe.split(",")
    options.impl = list(PEERS) if options.impl == "all" else options.impl.split(",")
    for name, known in (("op", OUTPUTS), ("recipe", RECIPES), ("impl", PEERS)):
        for value in getattr(options, name):
            if value not in known:
                parser.error(f"--{name} {value!r}: takes {', '.join(known)}")
    try:
        options.case = [parse_case(text) for text in options.case or ["cpu_2k"]]
    except ValueError as error:
        parser.error(str(error))
    options.dtype, options.device = getattr(torch, options.dtype), torch.device(options.device)
    return options


def print_list(options: argparse.Namespace) -> None:
    print("cases (batch, heads, seq, head_dim):")
    for case in CASES.values():
        print(f"  {case}")
    print(f"implementations, for {options.op[0]} on {options.device.type}:")
    problem = Problem(options.op[0], options.case[0], options.recipe[0], options.dtype, options.device)
    for peer in PEERS.values():
        print(f"  {peer.name:26} {peer.why_not(problem) or 'version ' + str(peer.version())}")


def entries(options: argparse.Namespace, problem: Problem) -> list[Entry]:
    """A row for each implementation, or for each of its recipes where it takes one."""
    rows = []
    for name in options.impl:
        peer = PEERS[name]
        recipes = options.recipe if peer.computes is None and problem.op in ATTENTION else options.recipe[:1]
        rows += [Entry(peer, problem.with_recipe(recipe)) for recipe in recipes]
    return rows


def check(entry: Entry) -> accuracy.Accuracy | None:
    if entry.peer.name == "copy":
        return None
    problem = accuracy.checkable(entry.problem)
    return accuracy.measure(entry.peer.prepare(problem), problem, entry.computes)


def prepare(entry: Entry, options: argparse.Namespace):
    if options.cuda_graph:
        return timing.in_cuda_graph(lambda: entry.peer.prepare(entry.problem), options.device)
    call = entry.peer.prepare(entry.problem)
    call()  # what it cannot run raises here
    return call


def release_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")


def describe(entry: Entry, options: argparse.Namespace) -> dict:
    case = entry.problem.case
    return {
        "op": entry.problem.op,
        "case": case.name,
        "shape": list(case.shape),
        "causal": case.causal,
        "dtype": str(options.dtype).removeprefix("torch."),
        "inputs": options.inputs,
        "seconds": options.seconds,
        "cuda_graph": options.cuda_graph,
        "impl": entry.peer.name,
        "version": entry.peer.version(),
        "computes": entry.computes,
    }


def run(problem: Problem, options: argparse.Namespace) -> list[dict]:
    """Records of one operator on one case, a row each. Correctness before timing, timing before memory."""
    rows = {entry.label: entry for entry in entries(options, problem)}
    reasons, accuracies, calls = {}, {}, {}
    for label, entry in rows.items():
        reasons[label] = entry.peer.why_not(entry.problem)
        if reasons[label]:
            continue
        try:
            accuracies[label] = None if options.no_check else check(entry)
            release_memory(options.device)
            calls[label] = prepare(entry, options)
        except Exception as error:  # peers say "not this one" in ways of their own
            reasons[label] = f"raised {type(error).__name__}: {first_line(error)}"
    timings = timing.measure(calls, options.device, options.seconds) if calls else {}
    clocks = environment.clocks(options.device)
    calls.clear()
    release_memory(options.device)
    yardstick = next(iter(timings.values()), None)
    records = []
    for label, entry in rows.items():
        record = {**describe(entry, options), "clocks": clocks}
        if label in timings:
            record |= measurements(entry, timings[label], yardstick, accuracies[label], options)
        else:
            record["not_run"] = reasons[label]
        records.append(record)
    return records


def measurements(entry, taken, yardstick, checked, options) -> dict:
    problem = entry.problem
    flops = counted_flops(problem.op, problem.case)
    moved = counted_bytes(problem.op, problem.case, problem.dtype.itemsize)
    if entry.peer.name == "copy":
        moved = counted_bytes("fake_quantize", problem.case, problem.dtype.itemsize)
    result = {
        "median_s": taken.median,
        "spread": taken.spread,
        "fastest_s": min(taken.samples),
        "samples": len(taken.samples),
        "tflops": flops / taken.median / 1e12 if flops else None,
        "gbs": moved / taken.median / 1e9 if moved else None,
        "ratio": taken.median / yardstick.median,
        "error": checked.errors if checked else None,
        "error_seq": checked.seq if checked else None,
        "error_heads": checked.heads if checked else None,
    }
    if options.memory:
        result |= memory.measure(entry.peer.name, problem)
    return result


def broken_promises(records: list[dict]) -> list[str]:
    """What is wrong with this package's own rows. A refusal (NotImplementedError) is an answer."""
    found = []
    for record in records:
        if record["impl"] != "attn_qat":
            continue
        row = f"attn_qat {record['op']} computing {record['computes']}"
        reason = record.get("not_run", "")
        if reason.startswith("raised ") and not reason.startswith("raised NotImplementedError"):
            found.append(f"{row} {reason}")
        for name, error in (record.get("error") or {}).items():
            if not error <= CONTRACT:
                found.append(f"{row}: {name} is off by {error:.2e}, promised {CONTRACT:g}")
    return found


def main() -> int:
    options = arguments()
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.list:
        print_list(options)
        return 0
    if options.device.type == "cuda":
        torch.cuda.set_device(options.device.index or 0)
        options.device = torch.device("cuda", torch.cuda.current_device())
    where = environment.describe(options.device)
    report.print_environment(where)
    wrong, ran = [], False
    for case in options.case:
        for op in options.op:
            problem = Problem(op, case, options.recipe[0], options.dtype, options.device, options.inputs)
            records = run(problem.filled(), options)
            report.print_table(records)
            sys.stdout.flush()
            if options.json:
                report.append_json(options.json, [{**where, **record} for record in records])
            wrong += broken_promises(records)
            ran = ran or any("not_run" not in record for record in records)
    report.print_legend()
    for line in wrong:
        print(line, file=sys.stderr)
    return 0 if ran and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
