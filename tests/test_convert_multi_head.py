"""`attn_qat.convert` and torch's own attention modules: nn.MultiheadAttention, encoder and decoder layers."""

import pytest
import torch
import torch.nn.functional as F
from contract import assert_close, assert_same_bits
from convert_models import (  # noqa: F401  fixtures among them
    HEADS,
    RECIPE,
    WIDTH,
    fake_attention,
    draw_fixture,
    fresh_fixture,
    make_fixture,
    x_fixture,
)
from torch import nn

import attn_qat

MULTI_HEAD = {
    "self": (dict(batch_first=True), "xxx", {}),
    "causal": (dict(batch_first=True), "xxx", {"attn_mask": "causal", "is_causal": True}),
    "sequence first": (dict(), "xxx", {}),
    "cross": (dict(batch_first=True), "xyy", {}),
    "own widths": (dict(batch_first=True, kdim=WIDTH, vdim=32), "xyz", {}),
    "no bias": (dict(batch_first=True, bias=False), "xyy", {}),
}


@pytest.mark.parametrize("options, inputs, call", MULTI_HEAD.values(), ids=MULTI_HEAD.keys())
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_multi_head_attention(training, options, inputs, call, make, draw, device, monkeypatch):
    attention = make(nn.MultiheadAttention, WIDTH, HEADS, **options).train(training)
    tensors = {"x": draw(2, 24, WIDTH), "y": draw(2, 24, WIDTH), "z": draw(2, 24, 32)}
    arguments = [tensors[name] for name in inputs]
    if "attn_mask" in call:
        call = {
            **call,
            "attn_mask": nn.Transformer.generate_square_subsequent_mask(24, device, torch.bfloat16),
        }
    with torch.set_grad_enabled(training):
        with attn_qat.convert(attention, recipe=RECIPE) as conversion:
            out, weights = attention(*arguments, need_weights=False, **call)
        assert conversion.replaced == [""] and weights is None
        monkeypatch.setattr(F, "scaled_dot_product_attention", fake_attention)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            want = attention(*arguments, need_weights=False, **call)[0]
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    assert_same_bits(out, want)


def test_multi_head_attention_without_a_batch(make, draw):
    attention, x = make(nn.MultiheadAttention, WIDTH, HEADS), draw(24, WIDTH)
    with attn_qat.convert(attention, recipe=RECIPE):
        out = attention(x, x, x, need_weights=False)[0]
        assert_same_bits(out, attention(*[x[:, None]] * 3, need_weights=False)[0][:, 0])


MULTI_HEAD_REFUSED = {
    "weights": ({}, {"need_weights": True}, "need_weights is True, takes False"),
    "padding": ({}, {"key_padding_mask": (2, 24)}, "key_padding_mask is given"),
    "mask": ({}, {"attn_mask": (24, 24)}, "attn_mask is given without is_causal=True"),
    "dropout": ({"dropout": 0.5}, {}, "dropout is 0.5 in training"),
    "bias_kv": ({"add_bias_kv": True}, {}, "add_bias_kv or add_zero_attn is set"),
    "zero": ({"add_zero_attn": True}, {}, "add_bias_kv or add_zero_attn is set"),
}


@pytest.mark.parametrize("options, call, reason", MULTI_HEAD_REFUSED.values(), ids=MULTI_HEAD_REFUSED.keys())
def test_multi_head_attention_refuses_with_the_reason(options, call, reason, make, draw, device):
    attention, x = make(nn.MultiheadAttention, WIDTH, HEADS, batch_first=True, **options), draw(2, 24, WIDTH)
    shaped = {
        name: torch.zeros(s, dtype=torch.bool, device=device)
        for name, s in call.items()
        if name != "need_weights"
    }
    call = {"need_weights": False, **call, **shaped}
    with attn_qat.convert(attention), pytest.raises(ValueError, match=reason):
        attention(x, x, x, **call)
    torch.manual_seed(0)
    want = attention(x, x, x, **call)[0]
    torch.manual_seed(0)
    with attn_qat.convert(attention, unsupported="leave") as conversion:
        assert_same_bits(attention(x, x, x, **call)[0], want)
    assert reason.split(",")[0] in conversion.left[""][0]


def test_is_causal_without_the_mask_is_refused_as_torch_refuses_it(make, draw):
    attention, x = make(nn.MultiheadAttention, WIDTH, HEADS, batch_first=True), draw(2, 24, WIDTH)
    with attn_qat.convert(attention), pytest.raises(ValueError, match="is_causal is True without attn_mask"):
        attention(x, x, x, need_weights=False, is_causal=True)
    with (
        attn_qat.convert(attention, unsupported="leave"),
        pytest.raises(RuntimeError, match="Need attn_mask"),
    ):
        attention(x, x, x, need_weights=False, is_causal=True)


NAMED = "*.self_attn"


@pytest.mark.parametrize("modules", [NAMED, None, "layers.1", "layers.1.self_attn"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_encoder_is_converted_also_where_torch_would_fuse_it(training, modules, make, x):
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, batch_first=True, dropout=0.0)
    encoder = make(nn.TransformerEncoder, layer, 2).train(training)
    with torch.set_grad_enabled(training):
        plain = encoder(x)
        with attn_qat.convert(encoder, recipe=RECIPE, modules=modules) as conversion:
            out = encoder(x)
            compiled = (
                torch.compile(encoder, backend="aot_eager", fullgraph=True)(x) if modules == NAMED else out
            )
    first = [] if modules and "1" in modules else ["layers.0.self_attn"]
    assert conversion.replaced == [*first, "layers.1.self_attn"]
    assert not torch.equal(out, plain)
    assert_close(out, plain, 5e-2)
    assert_close(compiled, out, 1e-2)


def test_encoder_with_padding_is_refused_not_fused(make, x, device):
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, batch_first=True)
    encoder, padding = (
        make(nn.TransformerEncoder, layer, 1).eval(),
        torch.zeros(2, 40, dtype=torch.bool, device=device),
    )
    padding[:, 30:] = True
    with torch.no_grad(), attn_qat.convert(encoder, modules="*.self_attn"):
        with pytest.raises(ValueError, match="'layers.0.self_attn': key_padding_mask is given"):
            encoder(x, src_key_padding_mask=padding)


def test_decoder_with_cross_attention(make, x, draw):
    layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 2 * WIDTH, batch_first=True, dropout=0.0)
    decoder, memory = make(nn.TransformerDecoder, layer, 1), draw(2, 24, WIDTH)
    mask = nn.Transformer.generate_square_subsequent_mask(40, x.device, x.dtype)
    plain = decoder(x, memory, tgt_mask=mask, tgt_is_causal=True)
    with attn_qat.convert(decoder, recipe=RECIPE) as conversion:
        out = decoder(x, memory, tgt_mask=mask, tgt_is_causal=True)
    assert conversion.replaced == ["layers.0.self_attn", "layers.0.multihead_attn"]
    assert_close(out, plain, 5e-2)
