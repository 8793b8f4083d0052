// delta = rowsum(O_hp * dO) in FP32: what the softmax backward subtracts from dP.
#include "attention_tiles.h"
#include "cpu.h"

namespace attn_qat::cpu {

void preprocess(const PreprocessParams& p, const Executor& executor) {
  constexpr int64_t kColumns = 512, kLd = padded(kColumns), kRows = 16;
  const TileOps& ops = tile_ops();
  const int64_t tiles = ceil_div(p.seq, kRows);
  for_each_task(executor, p.batch * p.heads * tiles, [&](int, int64_t task) {
    const int64_t bh = task / tiles, b = bh / p.heads, h = bh % p.heads;
    const int64_t from = task % tiles * kRows, rows = smaller(kRows, p.seq - from);
    alignas(kCacheLine) float out[kRows * kLd], grad[kRows * kLd];
    load_tile(ops, p.high_precision_out, p.dtype, b, h, from, rows, p.head_dim, out, kLd);
    load_tile(ops, p.grad_out, p.dtype, b, h, from, rows, p.head_dim, grad, kLd);
    ops.row_dot(out, grad, kLd, rows, p.head_dim, p.delta + bh * p.seq + from);
  });
}

}  // namespace attn_qat::cpu
