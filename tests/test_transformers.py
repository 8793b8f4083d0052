"""`attn_implementation="attn_qat"` in Hugging Face transformers, on tiny models made from a config."""

import inspect

import pytest
import torch
from contract import assert_close, assert_same_bits

import attn_qat

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from attn_qat.integrations.transformers import attention_forward, register  # noqa: E402

NAMES = {"fp4": "attn_qat_fp4", "fp4_qk": "attn_qat"}  # as in docs/transformers.md
each_recipe = pytest.mark.parametrize("recipe", NAMES)
VOCABULARY, LENGTH = 64, 32


@pytest.fixture(autouse=True)
def fresh():
    for recipe, name in NAMES.items():
        register(name, recipe)
    torch.manual_seed(0)
    torch._dynamo.reset()


def llama_config(**options):
    return transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=128,
        pad_token_id=0,
        eos_token_id=None,
        **options,
    )


def bert_config(**options):
    options = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0, **options}
    return transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=LENGTH,
        **options,
    )


MODELS = {"llama": ("LlamaForCausalLM", llama_config), "bert": ("BertForMaskedLM", bert_config)}
each_model = pytest.mark.parametrize("kind", MODELS)


@pytest.fixture
def make(device):
    """make(kind, attn_implementation, **config) -> the model, always with the same weights."""

    def make(kind, implementation, **options):
        torch.manual_seed(0)
        model, config = MODELS[kind]
        model = getattr(transformers, model)(config(attn_implementation=implementation, **options))
        return model.to(device, torch.bfloat16)

    return make


@pytest.fixture
def ids(device):
    """Sequences that count upwards from somewhere: something to learn."""
    return (torch.arange(LENGTH) + torch.tensor([[3], [11], [29], [40]])).remainder(VOCABULARY).to(device)


def train(model, ids, steps=12, rate=1e-3):
    """The loss of each step."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    return torch.tensor(losses)


def cache_option(model, cache):
    """transformers 5.24 calls `cache` what was past_key_values before."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    return {name: cache}


# --- Training and generation --------------------------------------------------------------------------------


@each_model
@each_recipe
def test_trains_as_with_sdpa(recipe, kind, make, ids):
    plain, fp4 = make(kind, "sdpa").train(), make(kind, NAMES[recipe]).train()
    want, got = train(plain, ids), train(fp4, ids)
    assert got[-1] < 0.8 * got[0]
    assert (got - want).abs().max() < 0.1
    assert not torch.equal(fp4(input_ids=ids).logits, plain(input_ids=ids).logits)


@each_model
@each_recipe
def test_the_same_as_converting_a_model_with_sdpa(recipe, kind, make, ids):
    """Two ways into the same attention, bit for bit: output and gradients."""
    registered, converted = make(kind, NAMES[recipe]), make(kind, "sdpa")
    results = []
    with attn_qat.convert(converted, recipe=recipe) as conversion:
        for model in (registered, converted):
            out = model(input_ids=ids, labels=ids)
            out.loss.backward()
            results.append([out.logits, *(p.grad for p in model.parameters())])
    assert len(conversion.replaced) == 2
    for got, want in zip(*results, strict=True):
        assert_same_bits(got, want)


def test_grouped_queries_reach_the_operator_ungrouped(device):
    q, k, v = (torch.randn(2, heads, 16, 64, device=device, dtype=torch.bfloat16) for heads in (4, 2, 2))
    module = torch.nn.Module()
    for is_causal in (True, False):
        out, weights = attention_forward(
            module, q, k, v, None, scaling=0.2, is_causal=is_causal, recipe="fp4_qk"
        )
        want = attn_qat.attention(q, k, v, softmax_scale=0.2, is_causal=is_causal, recipe="fp4_qk")
        assert_same_bits(out, want.transpose(1, 2))
        assert weights is None


def test_generates_what_it_predicts(make, ids):
    """Greedy generation with a cache continues the sequences that the model was trained on."""
    model = make("llama", NAMES["fp4_qk"])
    train(model.train(), ids, steps=25, rate=5e-3)
    out = model.eval().generate(
        ids[:, :8], attention_mask=torch.ones_like(ids[:, :8]), max_new_tokens=8, do_sample=False
    )
    assert torch.equal(out, ids[:, :16])


@pytest.mark.parametrize("pieces", [(24, 8), (8, 1, 23), (1, 31)], ids=str)
def test_cached_keys_are_seen_by_queries_that_follow(pieces, make, ids):
    """Any split of the sequence gives the logits of the whole: causal masks align bottom-right."""
    model = make("llama", NAMES["fp4_qk"]).eval()
    cache, parts = transformers.DynamicCache(), []
    with torch.no_grad():
        want = model(ids).logits
        for piece in ids.split(pieces, dim=1):
            parts.append(model(piece, **cache_option(model, cache), use_cache=True).logits)
    assert_close(torch.cat(parts, 1), want, 2e-2)


def test_compiled_in_one_graph(make, ids):
    for kind in MODELS:
        model = make(kind, "attn_qat").eval()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert_close(compiled(input_ids=ids).logits, model(input_ids=ids).logits, 2e-2)


def test_gradient_checkpointing_changes_nothing(make, ids):
    model = make("llama", "attn_qat").train()
    grads = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(ids, labels=ids, use_cache=False).loss.backward()
        grads.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad()
    for got, want in zip(*grads, strict=True):
        assert_same_bits(got, want)


def test_teacher_and_student_choose_for_themselves(make, ids):
    teacher, student, other = make("llama", "sdpa"), make("llama", "attn_qat"), make("llama", "attn_qat_fp4")
    plain = teacher(ids).logits
    assert not torch.equal(student(ids).logits, plain) and not torch.equal(
        student(ids).logits, other(ids).logits
    )
    student.set_attn_implementation("sdpa")
    assert_same_bits(student(ids).logits, plain)


# --- Models that do not ask ---------------------------------------------------------------------------------


def bloom(implementation):
    config = transformers.BloomConfig(
        vocab_size=VOCABULARY, hidden_size=128, n_layer=1, n_head=2, attn_implementation=implementation
    )
    return transformers.BloomForCausalLM(config)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_model_with_attention_of_its_own_is_refused(compiled, ids):
    """transformers takes the name for it; without this error it would see no mask, and later tokens."""
    model = bloom("attn_qat").to(ids.device)
    run = torch.compile(model, backend="aot_eager") if compiled else model
    with pytest.raises(ValueError, match="models of BloomConfig run attention of their own"):
        run(ids)
    assert torch.isfinite(bloom("eager").to(ids.device)(ids).logits).all()


@pytest.mark.parametrize(
    "family", ["Llama", "Bert", "Bart", "Whisper", "ViT", "CLIPText", "GPT2", "Mistral"]
)
def test_models_that_ask_are_not_refused(family):
    from attn_qat.integrations.transformers import _why_not_asked

    assert hasattr(transformers, f"{family}Model")  # imports its modeling file
    assert _why_not_asked(getattr(transformers, f"{family}Config")) is None


# --- Compiled without a cache -------------------------------------------------------------------------------


def test_compiled_gradient_checkpointing(make, ids, device):
    """It turns the cache off, for which transformers then traces a mask; with one given there is none."""

    def step(run, model, **options):
        model.zero_grad()
        loss = run(ids, labels=ids, **options).loss
        loss.backward()
        return loss.detach(), *(x.grad.clone() for x in model.parameters())

    model = make("llama", NAMES["fp4_qk"]).train()
    model.gradient_checkpointing_enable()
    want = step(model, model)
    compiled = torch.compile(model, backend="aot_eager")
    with pytest.raises(Exception, match="takes None: attention is full or causal"):
        compiled(ids, labels=ids)
    torch._dynamo.reset()
    got = step(compiled, model, past_key_values=transformers.DynamicCache(config=model.config))
    for x, y in zip(got, want, strict=True):
        assert_close(x, y)


# --- What is refused ----------------------------------------------------------------------------------------


def _left_padded(ids):
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    return {"attention_mask": mask}


def _packed(ids):
    return {
        "position_ids": torch.arange(16, device=ids.device).repeat(2).expand(len(ids), -1),
        "use_cache": False,
    }


REFUSED = {
    "padding, llama": ("llama", {}, _left_padded, "attention_mask has shape"),
    "padding, bert": ("bert", {}, _left_padded, "attention_mask has shape"),
    "packed sequences": ("llama", {}, _packed, "attention_mask has shape"),
    "a mask of one's own": (
        "llama",
        {},
        lambda ids: {"attention_mask": torch.zeros(1, 1, LENGTH, LENGTH, device=ids.device)},
        r"attention_mask has shape \(1, 1, 32, 32\), takes None",
    ),
    "dropout": (
        "bert",
        {"attention_probs_dropout_prob": 0.1},
        lambda ids: {},
        "dropout_p is 0.1, takes 0; set the",
    ),
    "probabilities": ("llama", {}, lambda ids: {"output_attentions": True}, "output_attentions is given"),
    "flash packing": (
        "llama",
        {},
        lambda ids: {"cu_seq_lens_q": torch.tensor([0, 16, 32], dtype=torch.int32)},
        "cu_seq_lens_q is given",
    ),
}


@pytest.mark.parametrize("kind, config, call, reason", REFUSED.values(), ids=REFUSED.keys())
def test_refused_with_the_reason(kind, config, call, reason, make, ids):
    model = make(kind, "attn_qat", **config).train()
    with pytest.raises(ValueError, match=f"^attn_qat in .*Attention: {reason}"):
        model(input_ids=ids, **call(ids))


def test_sliding_window_is_refused_where_it_hides_keys(device, ids):
    def make(window):
        config = transformers.MistralConfig(**{**llama_config().to_dict(), "sliding_window": window})
        config._attn_implementation = "attn_qat"
        return transformers.MistralForCausalLM(config).to(device, torch.bfloat16)

    model, whole = make(16), make(None)
    whole.load_state_dict(model.state_dict())
    assert_same_bits(model(ids[:, :16]).logits, whole(ids[:, :16]).logits)
    with pytest.raises(ValueError, match="attention_mask has shape"):
        model(ids[:, :17])


def test_a_mask_that_hides_nothing_is_none(make, ids):
    for kind in MODELS:
        model = make(kind, "attn_qat")
        assert_same_bits(
            model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits, model(input_ids=ids).logits
        )


def test_static_cache_is_refused(make, ids):
    model = make("llama", "attn_qat").eval()
    with pytest.raises(ValueError, match="static caches"):
        model.generate(ids[:, :8], max_new_tokens=4, do_sample=False, cache_implementation="static")


@pytest.mark.parametrize("argument", ["softcap", "s_aux", "position_bias"])
def test_arguments_that_change_the_result_are_refused(argument, device):
    q = torch.randn(1, 2, 16, 64, device=device, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=f"{argument} is given"):
        attention_forward(torch.nn.Module(), q, q, q, None, **{argument: torch.ones(2)})


# --- Registration -------------------------------------------------------------------------------------------


def test_registering_twice_is_the_same_and_taken_names_are_refused():
    assert register("attn_qat_fp4") == "attn_qat_fp4" == register("attn_qat_fp4", "fp4")
    with pytest.raises(
        ValueError, match="'attn_qat' is registered already as recipe fp4_qk, takes another name"
    ):
        register("attn_qat", "fp4")
    with pytest.raises(ValueError, match="'sdpa' is registered already as sdpa_attention_forward"):
        register("sdpa")
    with pytest.raises(ValueError, match="fp5"):
        register("attn_qat_fp5", "fp5")
