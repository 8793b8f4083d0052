"""attn-qat as an attention backend of Hugging Face diffusers, on tiny models made from a config."""

import pytest
import torch
from contract import assert_close, assert_same_bits

import attn_qat

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")

from diffusers.models.attention_dispatch import (  # noqa: E402
    AttentionBackendName,
    attention_backend,
    dispatch_attention_fn,
)

from attn_qat.integrations.diffusers import register, set_attention  # noqa: E402

NAMES = {"fp4": "attn_qat", "fp4_qk": "attn_qat_fp4_qk"}
each_recipe = pytest.mark.parametrize("recipe", NAMES)
SELF, CROSS = ["blocks.0.attn1", "blocks.1.attn1"], ["blocks.0.attn2", "blocks.1.attn2"]


@pytest.fixture(autouse=True)
def fresh():
    for recipe, name in NAMES.items():
        register(name, recipe)
    torch.manual_seed(0)
    torch._dynamo.reset()


@pytest.fixture
def wan(device):
    """A video transformer: self-attention over 32 patches, cross-attention to 6 text tokens."""

    def make():
        torch.manual_seed(0)
        model = diffusers.WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=2,
            attention_head_dim=64,
            in_channels=4,
            out_channels=4,
            text_dim=32,
            freq_dim=32,
            ffn_dim=128,
            num_layers=2,
            rope_max_seq_len=32,
        )
        return model.to(device, torch.bfloat16)

    return make


@pytest.fixture
def inputs(device):
    generator = torch.Generator().manual_seed(1)
    latents, text = (torch.randn(1, *shape, generator=generator) for shape in ((4, 2, 8, 8), (6, 32)))
    return {
        "hidden_states": latents.to(device, torch.bfloat16),
        "timestep": torch.tensor([500], device=device),
        "encoder_hidden_states": text.to(device, torch.bfloat16),
    }


@pytest.fixture
def dit(device):
    """An image transformer whose attention processor asks for no backend."""
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=64,
        in_channels=4,
        num_layers=2,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=10,
    )
    return model.to(device, torch.bfloat16).eval()


def run(model, inputs):
    return model(**inputs, return_dict=False)[0]


def gradients(model, inputs):
    out = run(model, inputs)
    out.float().square().mean().backward()
    return out.detach(), *(p.grad for p in model.parameters())


# --- Forward and backward -----------------------------------------------------------------------------------


@each_recipe
def test_the_same_as_converting_a_model_with_native_attention(recipe, wan, inputs):
    """Two ways into the same attention, bit for bit. Close to native, but not native."""
    by_backend, by_conversion, native = wan(), wan(), wan()
    assert set_attention(by_backend, NAMES[recipe]) == sorted(SELF + CROSS)
    got, plain = gradients(by_backend, inputs), gradients(native, inputs)
    with attn_qat.convert(by_conversion, recipe=recipe) as conversion:
        want = gradients(by_conversion, inputs)
    assert conversion.replaced == sorted(SELF + CROSS)
    for a, b in zip(got, want, strict=True):
        assert_same_bits(a, b)
    assert_close(got[0], plain[0], 5e-2)
    assert not torch.equal(got[0], plain[0])


def test_a_call_through_the_dispatcher(device):
    """(B, S, H, D), grouped heads, scale: what the backend is given reaches attn-qat."""
    q, k, v = (torch.randn(2, 16, heads, 64, device=device, dtype=torch.bfloat16) for heads in (4, 2, 2))
    out = dispatch_attention_fn(
        q, k, v, is_causal=True, scale=0.2, enable_gqa=True, backend=AttentionBackendName("attn_qat_fp4_qk")
    )
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    want = attn_qat.attention(q, k, v, is_causal=True, softmax_scale=0.2, recipe="fp4_qk")
    assert_same_bits(out, want.transpose(1, 2))


def test_trains(wan, inputs):
    model = wan()
    set_attention(model)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(6):
        loss = (run(model, inputs).float() - inputs["hidden_states"].float()).square().mean()
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


def test_compiled_in_one_graph(wan, inputs):
    model = wan()
    set_attention(model)
    want = run(model, inputs)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_close(run(compiled, inputs), want, 2e-2)


def test_converted_model_compiled_in_one_graph(wan, inputs):
    model = wan()
    with attn_qat.convert(model, modules="blocks.*.attn1"):
        want = run(model, inputs)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert_close(run(compiled, inputs), want, 2e-2)


# --- Which modules ------------------------------------------------------------------------------------------


def test_self_attention_alone(wan, inputs):
    model, native = wan(), wan()
    assert set_attention(model, modules="blocks.*.attn1") == SELF
    got = run(model, inputs)
    with attn_qat.convert(native, modules="blocks.*.attn1"):
        assert_same_bits(got, run(native, inputs))
    assert set_attention(native, exclude="*.attn2") == SELF
    assert_same_bits(run(native, inputs), got)


def test_modules_that_share_a_processor(wan, inputs):
    """Only the chosen ones get the backend, in this model and in another that holds the same processor."""
    model, other = wan(), wan()
    processor = model.blocks[0].attn1.processor
    for module in (*model.modules(), *other.modules()):
        if hasattr(module, "set_processor"):
            module.set_processor(processor)
    want, want_other = wan(), run(other, inputs)
    set_attention(want, modules="blocks.0.attn1")
    assert set_attention(model, modules="blocks.0.attn1") == ["blocks.0.attn1"]
    assert_same_bits(run(model, inputs), run(want, inputs))
    assert_same_bits(run(other, inputs), want_other)


def test_teacher_beside_student(wan, inputs):
    teacher, student = wan(), wan()
    plain = run(teacher, inputs)
    set_attention(student)
    assert not torch.equal(run(student, inputs), plain)
    assert_same_bits(run(teacher, inputs), plain)
    set_attention(student, "native")
    assert_same_bits(run(student, inputs), plain)


def test_the_names_of_diffusers_own_api(wan, inputs):
    """model.set_attention_backend and the attention_backend context know the name, too."""
    model = wan()
    with attention_backend("attn_qat"):
        want = run(model, inputs)
    default = attention_backend("native")  # set_attention_backend also changes the default of the process
    with default:
        model.set_attention_backend("attn_qat")
        assert_same_bits(run(model, inputs), want)
        model.blocks[0].attn1.set_attention_backend("native")
        assert not torch.equal(run(model, inputs), want)


def test_a_processor_that_asks_for_no_backend_is_refused_and_convert_takes_it(dit, device):
    with pytest.raises(
        ValueError, match="'transformer_blocks.0.attn1' has a AttnProcessor2_0.*attn_qat.convert"
    ):
        set_attention(dit)
    inputs = {
        "hidden_states": torch.randn(2, 4, 8, 8, device=device, dtype=torch.bfloat16),
        "timestep": torch.tensor([1, 2], device=device),
        "class_labels": torch.tensor([1, 2], device=device),
    }
    plain = run(dit, inputs)
    with attn_qat.convert(dit) as conversion:
        assert not torch.equal(run(dit, inputs), plain)
    assert conversion.replaced == ["transformer_blocks.0.attn1", "transformer_blocks.1.attn1"]


# --- What is refused ----------------------------------------------------------------------------------------

REFUSED = {
    "mask": ({"attn_mask": torch.ones(16, 16, dtype=torch.bool)}, "attn_mask is given, takes None"),
    "dropout": ({"dropout_p": 0.1}, "dropout_p is 0.1, takes 0"),
    "heads": ({"keys": (1, 16, 2, 64)}, "key has 2 heads and query 4, takes enable_gqa=True"),
    "causal": ({"keys": (1, 24, 4, 64), "is_causal": True}, "is_causal with 16 queries and 24 keys"),
    "parallel": ({"parallel_config": object()}, "context parallelism is on"),
}


@pytest.mark.parametrize("options, reason", REFUSED.values(), ids=REFUSED.keys())
def test_refused_with_the_reason(options, reason, device):
    options = dict(options)
    q = torch.randn(1, 16, 4, 64, device=device, dtype=torch.bfloat16)
    k = torch.randn(options.pop("keys", (1, 16, 4, 64)), device=device, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=f"^attn_qat in diffusers: {reason}"):
        dispatch_attention_fn(q, k, k, backend=AttentionBackendName("attn_qat"), **options)


def test_registering_twice_is_the_same_and_taken_names_are_refused(wan):
    assert register() == "attn_qat" == register("attn_qat", "fp4")
    with pytest.raises(
        ValueError, match="has a backend 'attn_qat' already, takes another name for recipe cudnn"
    ):
        register("attn_qat", "cudnn")
    with pytest.raises(ValueError, match="has a backend 'native' already"):
        register("native")
    with pytest.raises(ValueError, match="takes lower case"):
        register("Attn_QAT")
    with pytest.raises(ValueError, match="name is 'attn_qat_9', takes a registered backend: .*attn_qat"):
        set_attention(wan(), "attn_qat_9")
    with pytest.raises(ValueError, match="modules chooses no attention module"):
        set_attention(wan(), modules="blocks.0.ffn")
