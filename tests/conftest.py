"""Options and fixtures of the suite. `pytest --device cuda` runs the same tests on a GPU."""

import re
from collections import Counter

import pytest
import torch

import attn_qat  # noqa: F401  registers torch.ops.attn_qat

_UNSERVED = (
    re.compile(r"Could not run '(attn_qat::[\w.]+)' with arguments from the '(\w+)' backend"),
    re.compile(r"(\w+): no CUDA kernel takes this problem \((.*)\)"),
)
_unserved = Counter()  # (operator, backend or what each kernel takes) -> number of tests that met it


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="device the operators run on: cpu, cuda, cuda:1, ...")


@pytest.fixture(scope="session")
def device(request) -> torch.device:
    return torch.device(request.config.getoption("--device"))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """A test that meets a problem without a kernel on the GPU counts as xfailed and is listed at the end.

    On the CPU every operator must exist, so there it stays a failure."""
    report = (yield).get_result()
    if call.excinfo is None or item.config.getoption("--device") == "cpu":
        return
    found = next(filter(None, (pattern.search(str(call.excinfo.value)) for pattern in _UNSERVED)), None)
    if found and report.failed:
        _unserved[found.groups()] += 1
        report.outcome, report.wasxfail = "skipped", found[0]


def pytest_terminal_summary(terminalreporter):
    if _unserved:
        terminalreporter.section("problems without a kernel for this device")
    for (operator, why), count in sorted(_unserved.items()):
        terminalreporter.write_line(f"{operator} ({why}): {count} tests could not check it")
