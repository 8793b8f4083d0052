// Forward of NVFP4 fake-quantised attention (contract section 3).
//
//   t    = (softmax_scale * log2 e) * Q^ K^T            FP32
//   E    = ceil(max over the row of t)                  an integer, so factors 2^E are exact
//   p    = exp2(t - E)          l = rowsum(p)           lse = ln 2 * (E + log2 l)
//   O_hp = p V^ / l             O = fp4(p * 2^k) * 2^-k V^ / l
//
// Inference takes O alone, the same bits: O_hp is then left out, unless it is O (recipe fp4_qk).
//
// Keys and values are quantised once for a group of kv heads. A task is one tile of query rows: it keeps the
// scores of its rows against every key (memory grows with S), so E is final before anything is quantised and
// the result does not depend on the order of the tiles.
#include <cmath>
#include <initializer_list>

#include "attention_tiles.h"
#include "cpu.h"

namespace attn_qat::cpu {
namespace {

// Quantised keys and values of one kv head, in tiles of kTileK keys.
struct HeadKv {
  float* k_transposed;  // [tile][head_dim][padded(kTileK)]
  float* v;             // [padded rows][padded(head_dim)]
};

// One worker's tiles.
struct Scratch {
  float *q, *scores, *quantised, *out, *high_precision_out, *k_tile;
  float *row_max, *exponent, *row_sum, *inverse_sum;  // [kTileQ]
};

struct Sizes {
  int64_t head_dim, ld, tiles_k, keys;  // keys: padded to whole tiles
  explicit Sizes(const AttentionShape& s)
      : head_dim(s.head_dim), ld(padded(s.head_dim)), tiles_k(ceil_div(s.seq_k, kTileK)),
        keys(tiles_k * kTileK) {}
};

HeadKv carve_head(Arena& arena, const Sizes& z) {
  return {arena.floats(z.tiles_k * z.head_dim * padded(kTileK)), arena.floats(z.keys * z.ld)};
}

Scratch carve_scratch(Arena& arena, const Sizes& z) {
  Scratch s;
  s.q = arena.floats(kTileQ * z.ld);
  s.scores = arena.floats(z.tiles_k * kTileQ * padded(kTileK));
  s.quantised = arena.floats(kTileQ * padded(kTileK));
  s.out = arena.floats(kTileQ * z.ld);
  s.high_precision_out = arena.floats(kTileQ * z.ld);
  s.k_tile = arena.floats(kTileK * z.ld);
  for (float** row : {&s.row_max, &s.exponent, &s.row_sum, &s.inverse_sum}) *row = arena.floats(kTileQ);
  return s;
}

// Kv heads quantised together: enough tasks for every worker, without keeping more than a few megabytes.
int64_t heads_together(const AttentionShape& s, size_t head_bytes, int workers) {
  constexpr size_t kTarget = size_t{16} << 20;
  const int64_t tasks_per_head = s.heads_q / s.heads_kv * ceil_div(s.seq_q, kTileQ);
  const int64_t for_workers = ceil_div(4 * workers, tasks_per_head);
  const int64_t for_memory = static_cast<int64_t>(kTarget / (head_bytes + 1));
  return smaller(s.batch * s.heads_kv, for_workers > for_memory ? for_workers : for_memory);
}

class Forward {
 public:
  Forward(const ForwardParams& p)
      : p_(p), ops_(tile_ops()), z_(p.shape), mask_{p.shape.seq_q, p.shape.seq_k, p.causal},
        scale_(scale_log2(p.softmax_scale)) {}

  void quantize_keys(HeadKv head, int64_t kv_head, int64_t tile, const Scratch& s) const {
    const int64_t b = kv_head / p_.shape.heads_kv, h = kv_head % p_.shape.heads_kv;
    const int64_t from = tile * kTileK, rows = smaller(kTileK, p_.shape.seq_k - from),
                  full = round_up(rows, 16);
    load_tile(ops_, p_.k, p_.dtype, b, h, from, rows, z_.head_dim, s.k_tile, z_.ld);
    ops_.fake_quantize_rows(s.k_tile, z_.ld, full, z_.head_dim);
    ops_.transpose(s.k_tile, z_.ld, full, z_.head_dim, k_tile(head, tile), padded(kTileK));
    float* v = head.v + from * z_.ld;
    load_tile(ops_, p_.v, p_.dtype, b, h, from, rows, z_.head_dim, v, z_.ld);
    quantize_v_tile(ops_, p_.recipe, v, z_.ld, full, z_.head_dim);
  }

  void attend(HeadKv head, int64_t b, int64_t h, int64_t tile, const Scratch& s) const {
    const int64_t from = tile * kTileQ, rows = smaller(kTileQ, p_.shape.seq_q - from);
    const int64_t keys = mask_.visible_keys(from + rows);
    load_tile(ops_, p_.q, p_.dtype, b, h, from, rows, z_.head_dim, s.q, z_.ld);
    ops_.fake_quantize_rows(s.q, z_.ld, rows, z_.head_dim);
    for (int64_t r = 0; r < rows; ++r) s.row_max[r] = -INFINITY, s.row_sum[r] = 0.0f;
    score(head, rows, keys, from, s);
    for (int64_t r = 0; r < rows; ++r)
      s.exponent[r] = s.row_max[r] == -INFINITY ? 0.0f : std::ceil(s.row_max[r]);
    accumulate(head, rows, keys, s);
    write(b, h, from, rows, s);
  }

 private:
  float* k_tile(HeadKv head, int64_t tile) const {
    return head.k_transposed + tile * z_.head_dim * padded(kTileK);
  }

  static float* score_tile(const Scratch& s, int64_t tile) {
    return s.scores + tile * kTileQ * padded(kTileK);
  }

  void score(HeadKv head, int64_t rows, int64_t keys, int64_t from, const Scratch& s) const {
    for (int64_t j = 0; j * kTileK < keys; ++j) {
      const int64_t cols = round_up(smaller(kTileK, keys - j * kTileK), 16);
      float* t = score_tile(s, j);
      ops_.gemm({rows, cols, z_.head_dim, s.q, z_.ld, 1, k_tile(head, j), padded(kTileK), t, padded(kTileK),
                 false});
      ops_.scale_and_mask(t, padded(kTileK), rows, cols, scale_, mask_.first_limit(from, j * kTileK),
                          p_.causal, s.row_max);
    }
  }

  void accumulate(HeadKv head, int64_t rows, int64_t keys, const Scratch& s) const {
    const bool quantise = p_.recipe != Recipe::kFp4Qk, high_precision = !quantise || p_.training();
    if (keys == 0)
      for (int64_t i = 0; i < rows * z_.ld; ++i) s.out[i] = s.high_precision_out[i] = 0.0f;
    for (int64_t j = 0; j * kTileK < keys; ++j) {
      const int64_t cols = round_up(smaller(kTileK, keys - j * kTileK), 16);
      float* p = score_tile(s, j);
      const float* v = head.v + j * kTileK * z_.ld;
      ops_.forward_probabilities(p, padded(kTileK), rows, cols, s.exponent, probability_gain(p_.recipe),
                                 quantise ? s.quantised : nullptr, s.row_sum);
      if (high_precision)
        ops_.gemm(
            {rows, z_.head_dim, cols, p, padded(kTileK), 1, v, z_.ld, s.high_precision_out, z_.ld, j > 0});
      if (quantise)
        ops_.gemm({rows, z_.head_dim, cols, s.quantised, padded(kTileK), 1, v, z_.ld, s.out, z_.ld, j > 0});
    }
  }

  void write(int64_t b, int64_t h, int64_t from, int64_t rows, const Scratch& s) const {
    const int64_t first = (b * p_.shape.heads_q + h) * p_.shape.seq_q + from;
    for (int64_t r = 0; r < rows; ++r) {
      const bool empty = s.row_sum[r] == 0.0f;
      s.inverse_sum[r] = empty ? 0.0f : 1.0f / s.row_sum[r];
      const double log2_sum =
          static_cast<double>(s.exponent[r]) + std::log2(static_cast<double>(s.row_sum[r]));
      if (p_.lse) p_.lse[first + r] = empty ? -INFINITY : static_cast<float>(log2_sum * kLn2);
      if (p_.row_exponent) p_.row_exponent[first + r] = empty ? INT32_MIN : saturated(s.exponent[r]);
    }
    const float* out = p_.recipe == Recipe::kFp4Qk ? s.high_precision_out : s.out;
    store(p_.out, b, h, from, rows, out, s);
    if (p_.training()) store(p_.high_precision_out, b, h, from, rows, s.high_precision_out, s);
  }

  void store(const View& view, int64_t b, int64_t h, int64_t from, int64_t rows, const float* tile,
             const Scratch& s) const {
    ops_.store(tile, z_.ld, s.inverse_sum, rows, z_.head_dim, row_pointer(view, p_.dtype, b, h, from),
               p_.dtype, view.stride_s);
  }

  static int32_t saturated(float exponent) {
    if (!(exponent > -0x1p31f)) return INT32_MIN + 1;  // INT32_MIN means no key
    return exponent < 0x1p31f ? static_cast<int32_t>(exponent) : INT32_MAX;
  }

  const ForwardParams& p_;
  const TileOps& ops_;
  Sizes z_;
  Mask mask_;
  float scale_;
};

}  // namespace

size_t forward_workspace_bytes(const AttentionShape& shape, int workers) {
  if (shape.batch * shape.heads_kv * shape.heads_q * shape.seq_q == 0) return 0;
  const Sizes z(shape);
  const size_t head = bytes_of([&](Arena& a) { carve_head(a, z); });
  const size_t scratch = bytes_of([&](Arena& a) { carve_scratch(a, z); });
  return head * static_cast<size_t>(heads_together(shape, head, workers)) +
         scratch * static_cast<size_t>(workers);
}

void forward(const ForwardParams& p, void* workspace, const Executor& executor) {
  const AttentionShape& shape = p.shape;
  if (shape.batch * shape.heads_q * shape.seq_q == 0) return;
  const Forward op(p);
  const Sizes z(shape);
  const size_t head_bytes = bytes_of([&](Arena& a) { carve_head(a, z); });
  const size_t scratch_bytes = bytes_of([&](Arena& a) { carve_scratch(a, z); });
  const int64_t kv_heads = shape.batch * shape.heads_kv;
  const int64_t together = heads_together(shape, head_bytes, executor.workers);
  const auto head_at = [&](int64_t i) { return carve_at(workspace, head_bytes, i, carve_head, z); };
  const auto scratch_at = [&](int worker) {
    return carve_at(static_cast<char*>(workspace) + head_bytes * together, scratch_bytes, worker,
                    carve_scratch, z);
  };

  const int64_t group = shape.heads_q / shape.heads_kv, tiles_q = ceil_div(shape.seq_q, kTileQ);
  for (int64_t first = 0; first < kv_heads; first += together) {
    const int64_t count = smaller(together, kv_heads - first);
    for_each_task(executor, count * z.tiles_k, [&](int worker, int64_t i) {
      op.quantize_keys(head_at(i / z.tiles_k), first + i / z.tiles_k, i % z.tiles_k, scratch_at(worker));
    });
    for_each_task(executor, count * group * tiles_q, [&](int worker, int64_t i) {
      const int64_t local = i / (group * tiles_q), kv_head = first + local;
      const int64_t h = kv_head % shape.heads_kv * group + i / tiles_q % group;
      // Under a causal mask the last rows have the most keys: they go first.
      op.attend(head_at(local), kv_head / shape.heads_kv, h, tiles_q - 1 - i % tiles_q, scratch_at(worker));
    });
  }
}

}  // namespace attn_qat::cpu
