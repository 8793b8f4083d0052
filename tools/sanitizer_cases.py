"""Every CUDA kernel once at small sizes, for compute-sanitizer: tails, causal, grouped heads, strided views, all recipes,
every family of kernels that serves the device.

Results are compared with the CPU kernels, so that a run under the sanitizer is a test too.
"""

import argparse
import itertools
import os

import torch

import attn_qat  # noqa: F401  registers torch.ops.attn_qat

ops = torch.ops.attn_qat
SHAPES = [  # batch, query heads, kv heads, queries, keys, causal
    (1, 2, 2, 128, 128, False),
    (2, 2, 1, 65, 140, False),
    (1, 2, 2, 140, 140, True),
    (1, 1, 1, 33, 17, True),
    (1, 1, 1, 1, 1, False),
]


def relative_error(got, want):
    return ((got.cpu().float() - want.float()).norm() / want.float().norm().clamp_min(1e-20)).item()


def check_attention(shape, head_dim, dtype, recipe, unordered):
    batch, heads_q, heads_kv, queries, keys, causal = shape

    def draw(heads, length):  # laid out as (B, S, H, D), passed as the transposed view
        return torch.randn(batch, length, heads, head_dim).to(dtype).transpose(1, 2)

    q, grad_out = draw(heads_q, queries), draw(heads_q, queries)
    k, v = draw(heads_kv, keys), draw(heads_kv, keys)
    options = head_dim**-0.5, causal, recipe
    want = ops.forward(q, k, v, *options)
    gpu = [x.cuda() for x in (q, k, v, grad_out)]
    got = ops.forward(*gpu[:3], *options)
    want += ops.backward(grad_out, q, k, v, *want[1:3], *options, want[3])
    # Grouped heads take the unordered sums, so that both forms run.
    deterministic = heads_q == heads_kv and not unordered
    got += ops.backward(gpu[3], *gpu[:3], *got[1:3], *options, got[3], deterministic)
    if recipe != "cudnn":
        assert torch.equal(ops.infer(*gpu[:3], *options), got[0])
    for i in (0, 1, 4, 5, 6):
        if want[i].float().norm() > 1e-3:
            # Two backends each within 6e-3 of the reference, and single codes that flip in so small a problem.
            assert relative_error(got[i], want[i]) < 3e-2, (shape, head_dim, dtype, recipe, i)


def check_formats(dtype, axis):
    for size in ((3, 40, 24), (2, 33, 3, 64), (130, 128)):
        x = torch.randn(size).to(dtype)
        assert torch.equal(ops.fake_quantize(x.cuda(), axis).cpu(), ops.fake_quantize(x, axis))
    for tiled in (False, True):
        x = torch.randn(2, 34, 128).to(dtype)
        want = ops.quantize(x, axis, None, tiled)
        got = ops.quantize(x.cuda(), axis, None, tiled)
        assert all(torch.equal(a.cpu().view(torch.uint8), b.view(torch.uint8)) for a, b in zip(got, want))
        back = ops.dequantize(*got, dtype, axis, None, tiled)
        assert torch.equal(back.cpu(), ops.dequantize(*want, dtype, axis, None, tiled))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--unordered", action="store_true", help="backward with deterministic=False throughout")
    unordered = parser.parse_args().unordered
    torch.manual_seed(0)
    half = (torch.bfloat16, torch.float16)
    recipes = "cudnn", "fp4", "fp4_qk"
    for family in {attn_qat.explain("forward", *3 * [torch.zeros(1, 1, 1, 64, device="cuda").half()]), "mma_sync"}:
        os.environ["ATTN_QAT_KERNELS"] = family
        for shape, head_dim, dtype, recipe in itertools.product(SHAPES, (64, 128), half, recipes):
            check_attention(shape, head_dim, dtype, recipe, unordered)
    for dtype, axis in itertools.product((*half, torch.float32), (-1, -2)):
        check_formats(dtype, axis)
    torch.cuda.synchronize()
    print("all kernels agree with the CPU")


if __name__ == "__main__":
    main()
