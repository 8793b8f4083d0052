"""The benchmark program runs end to end on a small case and records what it promises. No time is judged."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from contract import RELATIVE

BENCH = Path(__file__).resolve().parents[1] / "benchmarks" / "bench.py"
IMPLEMENTATIONS = ("attn_qat", "eager", "sdpa")
KEYS = set(
    "date commit device clocks threads torch cuda instruction_sets load "
    "op case shape causal dtype inputs seconds cuda_graph impl version computes".split()
)
MEASURED = set("median_s spread fastest_s samples tflops gbs ratio error error_seq error_heads".split())


def bench(*arguments):
    command = [sys.executable, str(BENCH), "--seconds", "0", "--threads", "1", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def records_of(folder, *arguments):
    path = folder / "out.jsonl"
    done = bench("--case", "1,2,64,64,causal", "--json", path, *arguments)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in path.read_text().splitlines()], done.stdout


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_attention(dtype, tmp_path):
    ops = ("forward", "backward", "forward_backward")
    choice = ("--op", ",".join(ops), "--impl", ",".join(IMPLEMENTATIONS), "--dtype", dtype)
    records, printed = records_of(tmp_path, *choice, "--recipe", "fp4,cudnn,fp4_qk")
    ours, formula = ([(name, r) for r in ("fp4", "cudnn", "fp4_qk")] for name in ("attn_qat", "eager"))
    rows = [*ours, *formula, ("sdpa", "plain")]
    ran = [(r["op"], r["impl"], r["computes"]) for r in records]
    assert ran == [(op, *row) for op in ops for row in rows]
    for record in records:
        assert set(record) == KEYS | MEASURED
        assert record["shape"] == [1, 2, 64, 64] and record["causal"] and record["dtype"] == dtype
        assert record["median_s"] > 0 and record["tflops"] > 0 and record["samples"] >= 5
        assert record["error_seq"] == 64 and record["error_heads"] == 2
        assert all(error <= RELATIVE for error in record["error"].values()), record
    assert [r["ratio"] for r in records if (r["impl"], r["computes"]) == rows[0]] == [1, 1, 1]
    assert all(name in printed for name in (*ops, *IMPLEMENTATIONS, "TFLOP/s", "error"))


def test_operators_that_move_memory(tmp_path):
    choice = ("--op", "fake_quantize,quantize,preprocess", "--impl", "attn_qat,copy")
    records, printed = records_of(tmp_path, *choice)
    for ours, copy in zip(records[::2], records[1::2], strict=True):
        assert ours["tflops"] is None and ours["gbs"] > 0 and copy["gbs"] > 0
        bound = RELATIVE if ours["op"] == "preprocess" else 0  # quantisation is exact
        assert all(error <= bound for error in ours["error"].values()) and copy["error"] is None
    assert "GB/s" in printed


def test_memory_and_what_is_not_run(tmp_path):
    records, printed = records_of(tmp_path, "--op", "backward", "--impl", "attn_qat,sdpa_flash", "--memory")
    assert records[0]["peak_bytes"] >= 0 and records[0]["saved_bytes"] >= 0
    assert records[1]["not_run"] == "runs on CUDA only" and not MEASURED & set(records[1])
    assert "sdpa_flash" in printed and "peak memory" in printed


def test_inputs_that_are_quantized_already(tmp_path):
    choice = ("--op", "forward_backward", "--impl", "attn_qat,sdpa", "--inputs", "quantized")
    records, _ = records_of(tmp_path, *choice)
    assert all(error <= RELATIVE for record in records for error in record["error"].values())


def test_unknown_names_are_refused():
    for arguments in (("--impl", "flash"), ("--op", "sideways"), ("--case", "1,2,3"), ("--recipe", "int8")):
        done = bench(*arguments)
        assert done.returncode == 2 and arguments[1] in done.stderr and "takes" in done.stderr
    assert bench("--impl", "sdpa_flash", "--case", "tiny").returncode == 1  # nothing could run


def test_list():
    done = bench("--list")
    assert done.returncode == 0 and "cpu_2k (1,8,2048,128)" in done.stdout and "flash_attn4" in done.stdout
