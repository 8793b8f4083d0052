"""The whole test suite on a GPU, then every kernel under compute-sanitizer; one summary line at the end.

    python tools/test_gpu.py [--device cuda] [--skip-sanitizer]

compute-sanitizer comes with the CUDA toolkit, or from PyPI: nvidia-cuda-sanitizer-api.
"""

import argparse
import datetime
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch

import attn_qat

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")


def run(command):
    """Runs it with its output shown; returns (exit code, output)."""
    print("$", *command, flush=True)
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = []
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(line)
    return process.wait(), "".join(lines)


def sanitize(tool):
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        return "not installed"
    only_ours, options = ["--kernel-regex", "kns=attn_qat"], []
    if tool == "initcheck":
        # It does not see what bulk copies write, so that dQ must start from zeros; and it must see what torch's
        # kernels wrote.
        only_ours, options = [], ["--unordered"]
    command = [sanitizer, "--tool", tool, *only_ours, "--error-exitcode", "9"]
    code, output = run([*command, sys.executable, "tools/sanitizer_cases.py", *options])
    return "clean" if code == 0 else f"failed (exit {code}): {output.strip().splitlines()[-1]}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--skip-sanitizer", action="store_true")
    args = parser.parse_args()
    _, output = run([sys.executable, "-m", "pytest", "-q", "-r", "fE", "--device", args.device])
    counts = re.findall(r"^[=\s]*((?:\d+ \w+,? ?)+) in [\d.]+s", output, re.M)
    tests = counts[-1] if counts else "did not finish"
    results = {} if args.skip_sanitizer else {tool: sanitize(tool) for tool in TOOLS}
    name = torch.cuda.get_device_name(torch.device(args.device))
    about = attn_qat.build_info()
    print(f"{datetime.date.today()} | {name} | torch {torch.__version__} | CUDA {about['cuda']} | tests: {tests} | "
          + ", ".join(f"{tool} {result}" for tool, result in results.items()))  # fmt: skip
    failed = "failed" in tests or "error" in tests or not counts
    sys.exit(failed or any(result != "clean" for result in results.values()))


if __name__ == "__main__":
    main()
