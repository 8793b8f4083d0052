"""FastVideo's ATTN_QAT_TRAIN and ATTN_QAT_INFER: the documented interface, the numbers, its own selection.

The last section needs the fastvideo package and is skipped without it; the rest does not."""

import inspect
import logging
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from cases import Shape, make_case
from contract import assert_same_bits
from test_ops import step

import attn_qat
from attn_qat import inference
from attn_qat.integrations import fastvideo as ours

BACKENDS = {"ATTN_QAT_TRAIN": ours.AttnQatTrainBackend, "ATTN_QAT_INFER": ours.AttnQatInferBackend}
each_backend = pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS.keys())
each_impl = pytest.mark.parametrize("impl_cls", [ours.AttnQatTrainImpl, ours.AttnQatInferImpl])
OPTIONS = {"num_heads": 4, "head_size": 64, "causal": False, "softmax_scale": 0.125}
SHAPE = Shape(2, 4, 2, 33, 70, 64)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """No environment variable, and what `register` set is forgotten afterwards."""
    monkeypatch.delenv("FASTVIDEO_FA4_PV_MODE", raising=False)
    monkeypatch.setattr(ours, "_registered_recipe", attn_qat.Recipe.FP4)
    ours._log_once.cache_clear()


def blhd(x):
    """(B, H, L, D) values as FastVideo passes them: contiguous (B, L, H, D)."""
    return x.transpose(1, 2).contiguous()


# --- the interface ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_has_the_documented_interface(name):
    backend = BACKENDS[name]
    assert backend.get_name() == name
    assert backend.get_supported_head_sizes() == [64, 128]
    assert backend.accept_output_buffer is True
    for needless in (backend.get_metadata_cls, backend.get_builder_cls):
        with pytest.raises(NotImplementedError):
            needless()
    impl = backend.get_impl_cls()(**OPTIONS)
    assert impl.causal is False and impl.softmax_scale == 0.125
    x = torch.ones(2)
    assert impl.preprocess_qkv(x, None) is x and impl.postprocess_output(x, None) is x


@each_impl
def test_constructor_arguments(impl_cls):
    parameters = inspect.signature(impl_cls).parameters
    positional = ["num_heads", "head_size", "causal", "softmax_scale", "num_kv_heads", "prefix"]
    assert list(parameters) == [*positional, "extra_impl_args"]
    impl_cls(4, 128, True, 0.1, 2, "blocks.0.attn.impl", dropout_p=0.0, dropout_rate=0, nvfp4_fa4=False)


@each_impl
@pytest.mark.parametrize("argument", ["dropout_p", "dropout_rate"])
def test_dropout_is_refused_with_its_reason(argument, impl_cls):
    with pytest.raises(NotImplementedError, match=f"{argument} is 0.1, takes 0: the backward rebuilds P"):
        impl_cls(**OPTIONS, **{argument: 0.1})


@each_impl
@pytest.mark.parametrize(
    "change, error, text",
    [
        ({"head_size": 96}, ValueError, "head_size is 96, takes 64 or 128"),
        ({"num_kv_heads": 3}, ValueError, "num_kv_heads is 3, takes a divisor of num_heads, which is 4"),
        ({"num_kv_heads": 0}, ValueError, "num_kv_heads is 0"),
        ({"window_size": 5}, TypeError, "window_size=5, which this backend would ignore"),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else "",
)
def test_what_cannot_be_honoured_is_refused(change, error, text, impl_cls):
    with pytest.raises(error, match=text):
        impl_cls(**{**OPTIONS, **change})


# --- pv_mode and recipe -------------------------------------------------------------------------------------


@pytest.mark.parametrize("pv_mode", ["fp4", "bf16"])
def test_fa4_pv_mode_is_kept(pv_mode):
    assert ours.validate_fa4_pv_mode(pv_mode) == pv_mode
    assert ours.AttnQatInferImpl(**OPTIONS, fa4_pv_mode=pv_mode).fa4_pv_mode == pv_mode


@pytest.mark.parametrize(
    "pv_mode, error", [("fp8", NotImplementedError), ("fp16", ValueError), ("", ValueError)]
)
def test_a_wrong_fa4_pv_mode_fails_at_construction(pv_mode, error, monkeypatch):
    construct = partial(ours.AttnQatInferImpl, **OPTIONS)
    for call in (partial(construct, fa4_pv_mode=pv_mode), partial(ours.validate_fa4_pv_mode, pv_mode)):
        with pytest.raises(error, match=f"fa4_pv_mode is {pv_mode!r}"):
            call()
    monkeypatch.setenv("FASTVIDEO_FA4_PV_MODE", pv_mode)
    with pytest.raises(error, match=f"fa4_pv_mode is {pv_mode!r}"):
        construct()


def test_where_the_mode_comes_from(monkeypatch):
    """The layer's argument, else its recipe, else FastVideo's variable, else the registered recipe."""
    mode = lambda **options: ours.AttnQatInferImpl(**OPTIONS, **options).fa4_pv_mode  # noqa: E731
    assert mode() == "fp4"
    monkeypatch.setattr(ours, "_registered_recipe", attn_qat.Recipe.FP4_QK)
    assert mode() == "bf16"
    monkeypatch.setenv("FASTVIDEO_FA4_PV_MODE", "fp4")
    assert mode() == "fp4"
    assert mode(recipe="fp4_qk") == "bf16"
    assert mode(recipe="fp4", fa4_pv_mode="bf16") == "bf16"


def test_a_recipe_without_inference_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="recipe is 'cudnn', which no inference computes"):
        ours.AttnQatInferImpl(**OPTIONS, recipe="cudnn")
    monkeypatch.setattr(ours, "_registered_recipe", attn_qat.Recipe.CUDNN)
    with pytest.raises(ValueError, match="recipe is 'cudnn'"):
        ours.AttnQatInferImpl(**OPTIONS)
    assert ours.AttnQatInferImpl(**OPTIONS, fa4_pv_mode="bf16").fa4_pv_mode == "bf16"


@each_impl
def test_a_wrong_recipe_fails_at_construction(impl_cls):
    with pytest.raises(ValueError, match="recipe is 'fp5', takes 'cudnn', 'fp4' or 'fp4_qk'"):
        impl_cls(**OPTIONS, recipe="fp5")


# --- the numbers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["cudnn", "fp4", "fp4_qk"])
@pytest.mark.parametrize("head_size, causal", [(64, False), (128, True)])
def test_training_is_attention_on_blhd(head_size, causal, recipe, device):
    """Output and gradients have the bits of attn_qat.attention; the output is contiguous BLHD."""
    case = make_case(Shape(2, 4, 2, 33, 70, head_size, causal), device)
    options = {**OPTIONS, "head_size": head_size, "causal": causal, "num_kv_heads": 2}
    impl = ours.AttnQatTrainImpl(**options, recipe=recipe)

    def layer(q, k, v):
        out = impl.forward(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None)
        assert out.shape == (2, 33, 4, head_size) and out.is_contiguous()
        return out.transpose(1, 2)

    reference = partial(attn_qat.attention, is_causal=causal, softmax_scale=0.125, recipe=recipe)
    for got, want in zip(step(layer, case), step(reference, case), strict=True):
        assert_same_bits(got, want)


@pytest.mark.parametrize("pv_mode, recipe", [("fp4", "fp4"), ("bf16", "fp4_qk")])
def test_inference_repeats_training(pv_mode, recipe, device):
    """The same bits, layer for layer: what QAT is for."""
    case = make_case(SHAPE, device)
    q, k, v = (blhd(x) for x in (case.q, case.k, case.v))
    trained = ours.AttnQatTrainImpl(**OPTIONS, num_kv_heads=2, recipe=recipe).forward(q, k, v, None)
    inferred = ours.AttnQatInferImpl(**OPTIONS, num_kv_heads=2, fa4_pv_mode=pv_mode).forward(q, k, v, None)
    assert inferred.is_contiguous()
    assert_same_bits(inferred, trained)


@each_impl
def test_inputs_are_read_where_they_lie(impl_cls, device):
    """As FastVideo's distributed layer has them: chunks of one stacked tensor, cut to the unpadded length."""
    case = make_case(Shape(2, 4, 4, 40, 40, 64), device)
    q, k, v = (blhd(x) for x in (case.q, case.k, case.v))
    stacked = torch.cat([q, k, v])[:, :37]
    impl = impl_cls(**OPTIONS)
    want = impl.forward(*(x[:, :37].contiguous() for x in (q, k, v)), None)
    assert_same_bits(impl.forward(*stacked.chunk(3), None), want)


@each_impl
def test_a_mask_in_the_metadata_is_refused(impl_cls, device):
    class Metadata:
        attn_mask = None

    q = torch.ones(1, 16, 4, 64, dtype=torch.bfloat16, device=device)
    impl = impl_cls(**OPTIONS)
    assert impl.forward(q, q, q, Metadata()).shape == q.shape
    Metadata.attn_mask = torch.ones(1, 16, device=device)
    with pytest.raises(NotImplementedError, match="attn_mask"):
        impl.forward(q, q, q, Metadata())


@each_impl
def test_compiles_without_a_graph_break(impl_cls, device):
    q = blhd(make_case(Shape(1, 4, 4, 40, 40, 64), device).q)
    impl = impl_cls(**OPTIONS)
    compiled = torch.compile(impl.forward, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(q, q, q, None), impl.forward(q, q, q, None))


# --- which kernel -------------------------------------------------------------------------------------------

SERVED = ["sm_90a", "sm_100a"]
KERNELS = {f"mma_sync/{name}": SERVED for name in ("forward", "backward_dq", "backward_dkdv")}
HALF = {"mma_sync/forward": SERVED, "inference_only/forward": ["sm_120a"], **KERNELS}
DEVICES = [  # capability, kernels of the build, infer runs on, train runs on
    ((9, 0), KERNELS, "mma_sync", "mma_sync"),
    ((8, 9), KERNELS, None, None),  # the library is importable all the same
    ((12, 0), HALF, "inference_only", None),
    ((9, 0), {}, None, None),  # built without CUDA
]


@pytest.mark.parametrize("capability, kernels, infer, train", DEVICES, ids=str)
def test_availability_is_that_of_the_active_device(capability, kernels, infer, train, monkeypatch):
    monkeypatch.setattr(ours, "active_device", lambda: torch.device("cuda:0"))
    monkeypatch.setattr(inference, "_capability", lambda device: capability)
    monkeypatch.setattr(inference, "build_info", lambda: {"kernels": kernels})
    found = {
        ours.AttnQatInferBackend: (infer, ours.is_attn_qat_infer_available(), ours.attn_qat_infer_receipt()),
        ours.AttnQatTrainBackend: (train, ours.is_attn_qat_train_available(), ours.attn_qat_train_receipt()),
    }
    for backend, (kernel, available, receipt) in found.items():
        assert available == (kernel is not None)
        assert "\n" not in receipt and f"arch=sm_{capability[0]}{capability[1]}a" in receipt
        assert f"kernel={kernel or 'none'}" in receipt
        backend.get_impl_cls()(**OPTIONS)  # constructing one needs no kernel
        if available:
            assert ours.select(backend, 64).endswith(f".{backend.__name__}")
        else:
            with pytest.raises(NotImplementedError, match=f"{backend.get_name()}: no kernel.*kernel=none"):
                ours.select(backend, 64)


@each_backend
def test_selection_refuses_other_head_sizes(backend):
    with pytest.raises(NotImplementedError, match=f"{backend.get_name()}: head_size is 80, takes 64 or 128"):
        ours.select(backend, 80)


@each_impl
def test_what_the_kernels_do_not_take_raises(impl_cls, device):
    """The operator decides, and nothing else is computed in its place."""
    x = torch.ones(1, 16, 4, 64, device=device)
    impl = impl_cls(**OPTIONS)
    with pytest.raises(ValueError, match="q has dtype int32"):
        impl.forward(*[x.int()] * 3, None)
    if device.type == "cuda":
        with pytest.raises(NotImplementedError, match="no CUDA kernel takes this problem.*float16"):
            impl.forward(x, x, x, None)


def test_the_receipt_is_logged_once(caplog):
    with caplog.at_level(logging.INFO, logger="fastvideo"):
        for _ in range(3):
            ours.AttnQatInferImpl(**OPTIONS, fa4_pv_mode="bf16")
    (line,) = [r.message for r in caplog.records if "ATTN_QAT_INFER" in r.message]
    assert line == f"ATTN_QAT_INFER resolved: {ours.attn_qat_infer_receipt('bf16')}"
    assert "pv_mode=bf16" in line


# --- validation with the deployed kernel --------------------------------------------------------------------


class Layer(torch.nn.Module):
    """As FastVideo's attention layers keep their implementation."""

    def __init__(self, recipe):
        super().__init__()
        self.num_heads, self.head_size, self.num_kv_heads = 4, 64, 4
        self.attn_impl = ours.AttnQatTrainImpl(**OPTIONS, recipe=recipe)


def test_inference_layers_swaps_and_restores():
    model = torch.nn.ModuleList([Layer("fp4"), Layer("fp4_qk"), torch.nn.Linear(2, 2)])
    before = [model[0].attn_impl, model[1].attn_impl]
    with pytest.raises(KeyError), ours.inference_layers(model) as count:
        assert count == 2
        assert [type(layer.attn_impl) for layer in model[:2]] == [ours.AttnQatInferImpl] * 2
        assert [layer.attn_impl.fa4_pv_mode for layer in model[:2]] == ["fp4", "bf16"]
        raise KeyError
    assert [model[0].attn_impl, model[1].attn_impl] == before
    with ours.inference_layers(model, "bf16"):
        assert [layer.attn_impl.fa4_pv_mode for layer in model[:2]] == ["bf16", "bf16"]


@pytest.mark.parametrize(
    "model, text",
    [(torch.nn.Linear(2, 2), "has no layer"), (Layer("cudnn"), "recipe is 'cudnn'")],
    ids=["none", "cudnn"],
)
def test_inference_layers_refuses(model, text):
    with pytest.raises(ValueError, match=text), ours.inference_layers(model):
        pass


EXAMPLE = Path(__file__).parents[1] / "examples" / "fastvideo_backends.py"


def test_the_example_runs():
    """docs/fastvideo.md names it: training lowers the loss, and inference repeats its bits."""
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("step")]
    assert len(losses) == 5 and losses[-1] < losses[0]
    assert "the bits that ATTN_QAT_TRAIN trained with" in done.stdout and "kernel=" in done.stdout


# --- with and without FastVideo -----------------------------------------------------------------------------

WITHOUT = """
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "fastvideo":
            raise ModuleNotFoundError(f"No module named {name!r}", name="fastvideo")
sys.meta_path.insert(0, Hide())
import attn_qat
assert "attn_qat.integrations.fastvideo" not in sys.modules
from attn_qat.integrations import fastvideo as ours
assert ours.AttnQatInferBackend.get_name() == "ATTN_QAT_INFER" and "fastvideo" not in sys.modules
try:
    ours.register()
except ImportError:
    print("refused")
"""


def test_imports_without_fastvideo():
    """And only `register` needs it. Importing attn_qat does not import this integration."""
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "refused\n"


@pytest.fixture
def fastvideo():
    pytest.importorskip("fastvideo")
    from fastvideo import platforms

    ours.register()
    yield platforms
    ours.unregister()


@pytest.fixture
def names(fastvideo):
    return fastvideo.AttentionBackendEnum


def test_the_classes_derive_from_fastvideos(fastvideo):
    from fastvideo.attention.backends import abstract

    for name, backend in BACKENDS.items():
        assert issubclass(backend, abstract.AttentionBackend)
        assert issubclass(backend.get_impl_cls(), abstract.AttentionImpl)
        assert (
            not backend.get_impl_cls().__abstractmethods__
            and name in fastvideo.AttentionBackendEnum.__members__
        )


@pytest.mark.parametrize("name", BACKENDS)
def test_fastvideo_selects_the_registered_backend(name, names):
    from fastvideo.attention import get_attn_backend

    wanted = names[name]
    assert get_attn_backend(64, torch.bfloat16, (wanted,), requested=wanted) is BACKENDS[name]
    with pytest.raises(NotImplementedError, match="head_size is 80"):
        get_attn_backend(80, torch.bfloat16, (wanted,), requested=wanted)


def test_other_backends_are_left_to_fastvideo(fastvideo, names):
    """The platform answers for them as it did before."""
    question = names.TORCH_SDPA, 64, torch.float32
    ask = lambda: fastvideo.current_platform.get_attn_backend_cls(*question)  # noqa: E731
    registered = ask()
    kind = fastvideo.current_platform._enum
    ours.unregister()
    assert (registered, kind) == (ask(), fastvideo.current_platform._enum)


def test_register_and_unregister(fastvideo):
    platform = fastvideo.current_platform
    original = platform._attn_qat_replaces
    ours.register("fp4_qk")  # again: only the recipe changes
    assert fastvideo.current_platform is platform
    assert ours.AttnQatTrainImpl(**OPTIONS).recipe == "fp4_qk"
    assert ours.AttnQatInferImpl(**OPTIONS).fa4_pv_mode == "bf16"
    with pytest.raises(ValueError, match="register: recipe is 'fp5'"):
        ours.register("fp5")
    ours.unregister()
    ours.unregister()
    assert fastvideo.current_platform is original
    assert ours.AttnQatTrainImpl(**OPTIONS).recipe == "fp4"


@pytest.mark.parametrize("name", BACKENDS)
def test_fastvideos_attention_layer_runs_on_it(name, names, device, monkeypatch):
    from fastvideo.attention import LocalAttention
    from fastvideo.forward_context import set_forward_context

    case = make_case(Shape(1, 4, 4, 40, 40, 64), device)
    q, k, v = (blhd(x) for x in (case.q, case.k, case.v))
    monkeypatch.setenv("FASTVIDEO_ATTENTION_BACKEND", name)
    layer = LocalAttention(4, 64, supported_attention_backends=tuple(names), dropout_rate=0)
    assert layer.backend is names[name]
    with set_forward_context(current_timestep=0, attn_metadata=None):
        out = layer(q, k, v)
    assert_same_bits(out, blhd(attn_qat.attention(case.q, case.k, case.v)))
