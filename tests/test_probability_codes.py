"""The codes of P that the forward multiplied V with are those that the backward rebuilds from saved statistics.

Both can be read off: V = 6 on one key and one channel (exact in FP4) makes O a row of P^, and dO = 1 on one row makes dV
one. BF16 rounds each once, far less than the distance between two codes.
"""

import pytest
import torch
from cases import Shape, make_case

# Blocks of P whose scale is a normal E4M3 number whatever power of two P is held against: 2^11 P / 6 >= 2^-6. Below,
# scales have fewer digits, and a forward that has not seen the row's maximum yet may round one differently.
NORMAL = 2 * 6 * 2.0**-6 * 2.0**-11  # twice: P^ may be above P
FLIPS = 1e-5


def quantised_probabilities(case, saved, first_key: int):
    """P^ times the row sum for head_dim keys from first_key on: (Sq, D) by forward, and by backward."""
    batch, heads, seq, dim = case.q.shape
    window = slice(first_key, first_key + dim)
    one_hot = torch.eye(dim, device=case.q.device, dtype=case.q.dtype)
    v = torch.zeros_like(case.v)
    v[:, :, window] = 6 * one_hot
    out, high_precision_out, lse, row_exponent = torch.ops.attn_qat.forward(
        case.q, case.k, v, *case.options("fp4")
    )
    forward = out[0, 0].float() / 6
    backward = torch.empty(seq, dim, device=case.q.device)
    for first_row in range(0, seq, dim):
        grad_out = torch.zeros_like(case.q)
        grad_out[:, :, first_row : first_row + dim] = one_hot
        _, _, dv = torch.ops.attn_qat.backward(
            grad_out, case.q, case.k, v, high_precision_out, lse, *case.options("fp4"), row_exponent
        )
        backward[first_row : first_row + dim] = dv[0, 0, window].float().T
    row_sum = torch.exp2(lse[0, 0].double() / torch.tensor(2.0).double().log() - row_exponent[0, 0]).float()
    return forward * row_sum[:, None], backward * row_sum[:, None]


@pytest.mark.parametrize("kind", ["random", "peaked", "diffuse"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_forward_and_backward_choose_the_same_codes(head_dim, causal, kind, device):
    # One flip in 100,000 shows only among many values; the CPU, where none may differ, needs fewer.
    seq_q, seq_kv = (256, 512) if device.type == "cpu" else (512, 8192)
    flips = 0 if device.type == "cpu" else FLIPS
    case = make_case(Shape(1, 1, 1, seq_q, seq_kv, head_dim, causal), device, kind=kind)
    saved = case.forward("fp4")
    count = differing = 0
    for first_key in range(0, seq_kv, head_dim):
        forward, backward = quantised_probabilities(case, saved, first_key)
        larger = torch.maximum(forward, backward)
        above = (larger.unflatten(1, (-1, 16)).amax(-1, keepdim=True) >= NORMAL).expand(-1, -1, 16).flatten(1)
        count += int(above.sum())
        # Neighbouring codes differ by a sixth at least, two BF16 roundings by 2^-8.
        differing += int(((forward - backward).abs() > larger / 12)[above].sum())
    print(f"{differing} of {count} codes differ")
    assert count > 5_000
    assert differing <= flips * count
