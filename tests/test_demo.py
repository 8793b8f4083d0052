"""The demo end to end in a few steps; its text: none in both halves, the same batches for the same seed."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import attn_qat
from attn_qat.__main__ import main
from attn_qat.demo import cli, data, summary

PNG = b"\x89PNG\r\n\x1a\n"
RECIPES = ("cudnn", "fp4", "fp4_qk")


def run_demo(*arguments, **environment):
    path = os.pathsep.join(
        filter(None, (str(Path(attn_qat.__file__).parents[1]), os.environ.get("PYTHONPATH")))
    )
    return subprocess.run(
        [sys.executable, "-m", "attn_qat", "demo", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "120", **environment},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def quick(tmp_path_factory, device):
    out = tmp_path_factory.mktemp("demo")
    done = run_demo("--quick", "--out", out, "--device", device)
    assert done.returncode == 0, done.stderr
    return out, done.stdout


def test_tables_and_plots(quick):
    out, text = quick
    for line in (
        "Validation loss, nats per byte",
        "Cost of FP4 attention",
        "Relative error of dV",
        "PSF-2.0",
        "Seed noise:",
        "up to 15 later",
        "the losses mean nothing",
    ):
        assert line in text
    for recipe in RECIPES:
        assert f"+ {recipe}" in text
    for name in ("losses.png", "fidelity.png"):
        assert (out / name).read_bytes().startswith(PNG)


def test_results_are_finite_and_complete(quick):
    out, _ = quick
    text = (out / "results.json").read_text()
    results = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in results.json"))
    assert len(results["losses"]) == cli.QUICK.seeds
    for run in results["losses"]:
        assert set(run) == {"pretrained", "bf16", *RECIPES}
        assert set(run["pretrained"]) == set(run["bf16"]) == {"bf16", *RECIPES}
        values = [value for row in run.values() for value in row.values()]
        # An untrained model predicts every byte alike: log(256) nats.
        assert all(0 < value < math.log(256) for value in values)
    for recipe in RECIPES:
        c = results["comparisons"][recipe]
        assert c["won_back"]["mean"] == pytest.approx(c["cost_without"]["mean"] - c["cost_with"]["mean"])
    assert results["dv_error"]["1024"]["fp4"] < 0.11 < 0.19 < results["dv_error"]["1024"]["cudnn"]
    assert results["dv_error"]["1024"]["fp4_qk"] < 6e-3


def test_saved_models_load(quick):
    models = torch.load(quick[0] / "models.pt", map_location="cpu")
    assert set(models) == {"bf16", *RECIPES}
    for state in models.values():
        cli.QUICK.model(0).load_state_dict(state)


def test_no_text_is_in_both_halves():
    documents = data.read_documents([])[0]
    train, validation = ([data.normalised(p) for p in half] for half in data.split(documents))
    assert not set(train) & set(validation)
    assert len(set(train + validation)) == len(train) + len(validation)
    every = {data.normalised(p) for document in documents for p in document.split("\n\n")} - {""}
    assert set(train + validation) == every
    assert 0.08 < sum(map(len, validation)) / sum(map(len, train)) < 0.2


def test_text_and_batches_repeat():
    one, two = data.load(), data.load()
    assert one.sha256 == two.sha256 and torch.equal(one.train, two.train)

    def batches(seed):
        generator = torch.Generator().manual_seed(seed)
        return torch.stack([torch.stack(one.batch(generator, 4, 64)) for _ in range(3)])

    assert torch.equal(batches(0), batches(0))
    assert not torch.equal(batches(0), batches(1))
    x, y = batches(0)[0]
    assert torch.equal(x[:, 1:], y[:, :-1])


def test_text_from_a_file(tmp_path):
    file = tmp_path / "text"
    file.write_text("\n\n".join(f"paragraph {i} " + "x" * 500 for i in range(100)))
    corpus = data.load([file])
    assert corpus.source == str(file) and len(corpus.train) > 5 * len(corpus.validation) > 0


def losses(control, without, trained):
    return {
        "pretrained": {"bf16": control, "fp4": without},
        "bf16": {"bf16": control, "fp4": without},
        "fp4": {"bf16": control, "fp4": trained},
    }


@pytest.mark.parametrize(
    "runs, words",
    [
        ([losses(1.0, 1.10, 1.05), losses(2.0, 2.12, 2.06), losses(1.5, 1.61, 1.56)], "more than the noise"),
        (
            [losses(1.0, 1.10, 1.05), losses(2.0, 2.12, 2.19), losses(1.5, 1.61, 1.56)],
            "not distinguishable from 0 at",
        ),
        ([losses(1.0, 1.10, 1.15), losses(2.0, 2.12, 2.18), losses(1.5, 1.61, 1.66)], "made it worse"),
        (
            [losses(1.0, 1.10, 1.05), losses(2.0, 1.95, 2.06)],
            "cost of FP4 (0.0250 nats per byte) is not above 0",
        ),
        ([losses(1.0, 1.10, 1.05)], "no conclusion"),
    ],
    ids=["gain", "noise", "loss", "no cost", "one seed"],
)
def test_verdict_follows_from_the_numbers(runs, words):
    assert words in summary.compare(runs, "fp4").verdict


@pytest.mark.parametrize(
    "shift, words", [(0.0, "not distinguishable"), (0.1, "fp4 is lower"), (-0.1, "cudnn is lower")], ids=str
)
def test_comparison_of_two_recipes(shift, words):
    def comparison(recipe, *costs):
        cost = summary.Sample(costs)
        return summary.Comparison(recipe, cost, cost, cost, cost)

    a = comparison("cudnn", 0.010 + shift, 0.012 + shift, 0.011 + shift)
    assert words in summary.between(a, comparison("fp4", 0.011, 0.011, 0.011))


def test_interval_of_the_mean():
    low, high = summary.Sample((1.0, 2.0, 3.0)).interval  # 2 -+ 4.303 / sqrt(3)
    assert (low, high) == pytest.approx((-0.4843, 4.4843), abs=1e-4)


def test_missing_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name == "rich" else object())
    with pytest.raises(SystemExit, match=r"needs rich: pip install 'attn-qat\[demo\]'"):
        main(["demo", "--quick", "--out", str(tmp_path)])


def test_text_too_short_is_refused(tmp_path):
    file = tmp_path / "text"
    file.write_text("short")
    with pytest.raises(SystemExit, match="5 bytes to train and 0 to validate; both must exceed 64"):
        main(["demo", "--quick", "--text", str(file), "--out", str(tmp_path)])


@pytest.mark.parametrize("arguments", (["--seeds", "0"], ["--recipes", "fp8"]), ids=" ".join)
def test_bad_options_are_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        main(["demo", *arguments])
    assert arguments[1] in capsys.readouterr().err


def test_info_prints_the_build(capsys):
    assert main(["info"]) == 0
    assert json.loads(capsys.readouterr().out) == attn_qat.build_info()
