"""What the integrations have in common: nothing is imported early, a missing package is named, every example
runs."""

import importlib
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
OPTIONAL = ("transformers", "diffusers", "torchao")
SLOW = ("torch._dynamo", "sympy")  # a second of every import
PAGES = ("whole_model", "transformers", "diffusers")
EXAMPLES = {  # name -> what its output must hold
    "whole_model": r"'encoder.layers.0.self_attn': replaced",
    "transformers_llama": r"attn_qat: 4\.\d+, .*\nprompt \[0, 1, 2, 3, 4, 5, 6, 7\], continued \[",
    "diffusers_wan": r"attn_qat: \d+\.\d+, \d+\.\d+",
    "torchao_linears": r"IntxUnpackedToInt8Tensor weights; .* replaced in 2 modules",
}


def test_importing_attn_qat_imports_nothing_optional_or_slow():
    code = "import sys, attn_qat, attn_qat.integrations.sdpa; print(*set(sys.modules) & set(sys.argv[1:]))"
    found = subprocess.run(
        [sys.executable, "-c", code, *OPTIONAL, *SLOW],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT / "python",
    )
    assert found.stdout.split() == []


@pytest.mark.parametrize("package", ["transformers", "diffusers"])
def test_a_missing_package_is_named_with_what_to_install(package, monkeypatch):
    name = f"attn_qat.integrations.{package}"
    for module in [m for m in sys.modules if m == package or m.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(
        ImportError, match=rf"{name} needs {package}, which is not installed: pip install '{package}>="
    ):
        importlib.import_module(name)


def needs_of(source: str) -> None:
    """Skips the test unless what the source imports is installed."""
    for package in OPTIONAL:
        if re.search(rf"^(from|import) {package}\b", source, re.MULTILINE):
            pytest.importorskip(package, reason=f"{package} is not installed")


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs_from_top_to_bottom(page):
    text = (ROOT / "docs" / f"{page}.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    source = "\n".join(blocks)
    needs_of(source)
    assert len(blocks) >= 3
    exec(compile(source, f"docs/{page}.md", "exec"), {"__name__": "__main__"})


def test_every_example_is_run():
    """Here, or by the tests of what it shows."""
    elsewhere = {"cudnn_backward", "fastvideo_backends", "dtensor", "ulysses"}
    assert set(EXAMPLES) | elsewhere == {path.stem for path in (ROOT / "examples").glob("*.py")}
    tests = "".join(path.read_text() for path in ROOT.glob("tests/test_*.py") if path.name != Path(__file__).name)
    assert not {name for name in elsewhere if name not in tests}


@pytest.mark.filterwarnings("ignore")  # of the packages shown
@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_runs(example, device, monkeypatch, capsys):
    path = ROOT / "examples" / f"{example}.py"
    needs_of(path.read_text())
    torch.manual_seed(0)
    monkeypatch.setattr(sys, "argv", [path.name, "--device", str(device), "--steps", "2"])
    runpy.run_path(str(path), run_name="__main__")
    assert re.search(EXAMPLES[example], capsys.readouterr().out, re.DOTALL)
