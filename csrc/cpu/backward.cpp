// Backward of NVFP4 fake-quantised attention (contract section 4), flash style: P is rebuilt tile by tile.
//
//   p  = exp2(t - E)      P = p * 2^E * exp(-lse)      dP = dO V^T      dS = bf16(P * (dP - delta))
//   dQ = softmax_scale * dS K^        dK = softmax_scale * dS^T Q^        dV = fp4(P)^T dO
//
// Two ways to spread the work, with the same bits: dQ of a row sums over key tiles in ascending order, dK and
// dV of a key over query heads and query tiles in ascending order, whatever runs where.
//   per head:  a worker does whole kv heads, five matrix products a tile;
//   per tile:  all workers share one kv head, dQ by query tiles, dK/dV by key tiles, seven products a tile.
#include <cmath>
#include <initializer_list>

#include "attention_tiles.h"
#include "cpu.h"

namespace attn_qat::cpu {
namespace {

enum class Split { kPerHead, kPerTile };

// FP32 operands of one kv head and of the query head in work. A stride of 0 keeps a single tile.
struct Head {
  float *q, *grad_out, *dq;                // [padded rows][ld]
  RowStatistics* statistics;               // [padded rows]
  float *k, *k_transposed, *v_transposed;  // tiles: [kTileK][ld], [head_dim][padded(kTileK)] twice
  float *dk, *dv;                          // tiles: [kTileK][ld]
};

struct Scratch {
  float *s, *dp;  // [kTileQ][padded(kTileK)]
  float* v;       // [kTileK][ld]
  float* row_scale;
};

struct Sizes {
  int64_t head_dim, ld, tiles_q, tiles_k, group, rows, k_tiles_kept, gradient_tiles_kept;
  Sizes(const AttentionShape& s, Split split)
      : head_dim(s.head_dim), ld(padded(s.head_dim)), tiles_q(ceil_div(s.seq_q, kTileQ)),
        tiles_k(ceil_div(s.seq_k, kTileK)), group(s.heads_q / s.heads_kv), rows(tiles_q * kTileQ),
        k_tiles_kept(split == Split::kPerTile ? tiles_k : 1),
        gradient_tiles_kept(split == Split::kPerTile || group > 1 ? tiles_k : 1) {}
  int64_t transposed_tile() const { return head_dim * padded(kTileK); }
};

Head carve_head(Arena& arena, const Sizes& z) {
  Head h;
  for (float** x : {&h.q, &h.grad_out, &h.dq}) *x = arena.floats(z.rows * z.ld);
  h.statistics = reinterpret_cast<RowStatistics*>(arena.floats(z.rows * int64_t{sizeof(RowStatistics) / 4}));
  h.k = arena.floats(z.k_tiles_kept * kTileK * z.ld);
  for (float** x : {&h.k_transposed, &h.v_transposed})
    *x = arena.floats(z.k_tiles_kept * z.transposed_tile());
  for (float** x : {&h.dk, &h.dv}) *x = arena.floats(z.gradient_tiles_kept * kTileK * z.ld);
  return h;
}

Scratch carve_scratch(Arena& arena, const Sizes& z) {
  Scratch s;
  for (float** x : {&s.s, &s.dp}) *x = arena.floats(kTileQ * padded(kTileK));
  s.v = arena.floats(kTileK * z.ld);
  s.row_scale = arena.floats(kTileK);
  return s;
}

// Workers that can each hold a head of their own.
int64_t head_workers(const AttentionShape& s, int workers) { return smaller(workers, s.batch * s.heads_kv); }

Split choose_split(const AttentionShape& s, bool wants_dq, bool wants_dkdv, int workers) {
  const int64_t heads = s.batch * s.heads_kv;
  const int64_t products_per_head = 2 + wants_dq + 2 * wants_dkdv;
  const int64_t products_per_tile = 3 * wants_dq + 4 * wants_dkdv;
  const bool tiles_for_all = ceil_div(s.seq_q, kTileQ) + ceil_div(s.seq_k, kTileK) >= 4 * workers;
  const bool heads_fill = products_per_head * workers * ceil_div(heads, workers) <= products_per_tile * heads;
  return heads_fill || !tiles_for_all ? Split::kPerHead : Split::kPerTile;
}

class Backward {
 public:
  Backward(const BackwardParams& p, Split split)
      : p_(p), ops_(tile_ops()), z_(p.shape, split), mask_{p.shape.seq_q, p.shape.seq_k, p.causal},
        scale_(scale_log2(p.softmax_scale)), wants_dq_(p.dq.data), wants_dkdv_(p.dk.data) {}

  const Sizes& sizes() const { return z_; }

  void load_queries(const Head& head, int64_t b, int64_t h, int64_t i, const Scratch& s) const {
    const int64_t from = i * kTileQ, rows = smaller(kTileQ, p_.shape.seq_q - from);
    float *q = head.q + from * z_.ld, *grad_out = head.grad_out + from * z_.ld;
    load_tile(ops_, p_.q, p_.dtype, b, h, from, rows, z_.head_dim, q, z_.ld);
    ops_.fake_quantize_rows(q, z_.ld, rows, z_.head_dim);
    load_tile(ops_, p_.grad_out, p_.dtype, b, h, from, rows, z_.head_dim, grad_out, z_.ld);
    float* delta = s.row_scale;
    if (!p_.delta) {
      load_tile(ops_, p_.high_precision_out, p_.dtype, b, h, from, rows, z_.head_dim, s.v, z_.ld);
      ops_.row_dot(s.v, grad_out, z_.ld, rows, z_.head_dim, delta);
    }
    const int64_t first = (b * p_.shape.heads_q + h) * p_.shape.seq_q + from;
    for (int64_t r = 0; r < rows; ++r)
      head.statistics[from + r] = row_statistics(first + r, p_.delta ? p_.delta[first + r] : delta[r]);
    if (wants_dq_) zero(head.dq + from * z_.ld, rows);
  }

  void load_keys(const Head& head, int64_t b, int64_t h, int64_t j, const Scratch& s) const {
    const int64_t from = j * kTileK, rows = smaller(kTileK, p_.shape.seq_k - from), full = round_up(rows, 16);
    float* k = tile(head.k, j, z_.k_tiles_kept, kTileK * z_.ld);
    load_tile(ops_, p_.k, p_.dtype, b, h, from, rows, z_.head_dim, k, z_.ld);
    ops_.fake_quantize_rows(k, z_.ld, full, z_.head_dim);
    ops_.transpose(k, z_.ld, full, z_.head_dim, k_transposed(head, j), padded(kTileK));
    load_tile(ops_, p_.v, p_.dtype, b, h, from, rows, z_.head_dim, s.v, z_.ld);
    quantize_v_tile(ops_, p_.recipe, s.v, z_.ld, full, z_.head_dim);
    ops_.transpose(s.v, z_.ld, full, z_.head_dim, v_transposed(head, j), padded(kTileK));
  }

  void zero_keys(const Head& head, int64_t j) const {
    zero(gradient(head.dk, j), kTileK);
    zero(gradient(head.dv, j), kTileK);
  }

  // Query tiles that see some key of tile j start here.
  int64_t first_query_tile(int64_t j) const {
    const int64_t row = p_.causal ? j * kTileK - (p_.shape.seq_k - p_.shape.seq_q) : 0;
    return row > 0 ? row / kTileQ : 0;
  }

  int64_t key_tiles(int64_t i) const { return ceil_div(mask_.visible_keys((i + 1) * kTileQ), kTileK); }

  // Leaves the left operand of dV in s.s and dS in s.dp.
  void probabilities(const Head& head, int64_t i, int64_t j, Recipe recipe, const Scratch& s) const {
    const int64_t rows = query_rows(i), cols = key_columns(j), ld = padded(kTileK), from = i * kTileQ;
    ops_.gemm({rows, cols, z_.head_dim, head.q + from * z_.ld, z_.ld, 1, k_transposed(head, j), ld, s.s, ld,
               false});
    ops_.gemm({rows, cols, z_.head_dim, head.grad_out + from * z_.ld, z_.ld, 1, v_transposed(head, j), ld,
               s.dp, ld, false});
    ops_.backward_probabilities(s.s, s.dp, ld, rows, cols, scale_, mask_.first_limit(from, j * kTileK),
                                p_.causal, head.statistics + from, recipe);
  }

  void add_dq(const Head& head, int64_t i, int64_t j, const Scratch& s) const {
    const float* k = tile(head.k, j, z_.k_tiles_kept, kTileK * z_.ld);
    ops_.gemm({query_rows(i), z_.head_dim, key_columns(j), s.dp, padded(kTileK), 1, k, z_.ld,
               head.dq + i * kTileQ * z_.ld, z_.ld, true});
  }

  void add_dkdv(const Head& head, int64_t i, int64_t j, const Scratch& s) const {
    const int64_t rows = query_rows(i), cols = key_columns(j), from = i * kTileQ * z_.ld;
    ops_.gemm({cols, z_.head_dim, rows, s.s, 1, padded(kTileK), head.grad_out + from, z_.ld,
               gradient(head.dv, j), z_.ld, true});
    ops_.gemm({cols, z_.head_dim, rows, s.dp, 1, padded(kTileK), head.q + from, z_.ld, gradient(head.dk, j),
               z_.ld, true});
  }

  void store_dq(const Head& head, int64_t b, int64_t h, int64_t i, const Scratch& s) const {
    store(p_.dq, head.dq + i * kTileQ * z_.ld, b, h, i * kTileQ, query_rows(i), p_.softmax_scale, s);
  }

  void store_dkdv(const Head& head, int64_t b, int64_t h, int64_t j, const Scratch& s) const {
    const int64_t from = j * kTileK, rows = smaller(kTileK, p_.shape.seq_k - from);
    store(p_.dk, gradient(head.dk, j), b, h, from, rows, p_.softmax_scale, s);
    store(p_.dv, gradient(head.dv, j), b, h, from, rows, 1.0f, s);
  }

  bool wants_dq() const { return wants_dq_; }
  bool wants_dkdv() const { return wants_dkdv_; }

 private:
  static float* tile(float* base, int64_t j, int64_t kept, int64_t size) {
    return kept == 1 ? base : base + j * size;
  }
  float* k_transposed(const Head& h, int64_t j) const {
    return tile(h.k_transposed, j, z_.k_tiles_kept, z_.transposed_tile());
  }
  float* v_transposed(const Head& h, int64_t j) const {
    return tile(h.v_transposed, j, z_.k_tiles_kept, z_.transposed_tile());
  }
  float* gradient(float* base, int64_t j) const {
    return tile(base, j, z_.gradient_tiles_kept, kTileK * z_.ld);
  }
  int64_t query_rows(int64_t i) const { return smaller(kTileQ, p_.shape.seq_q - i * kTileQ); }
  int64_t key_columns(int64_t j) const { return round_up(smaller(kTileK, p_.shape.seq_k - j * kTileK), 16); }

  void zero(float* x, int64_t rows) const {
    for (int64_t i = 0; i < rows * z_.ld; ++i) x[i] = 0.0f;
  }

  RowStatistics row_statistics(int64_t row, float delta) const {
    const float lse = p_.lse[row];
    if (lse == -INFINITY) return {0.0f, 0.0f, 0.0f};
    const double lse2 = static_cast<double>(lse) * kLog2e;
    const int32_t saved = p_.row_exponent ? p_.row_exponent[row] : INT32_MAX;
    const bool use_saved = saved != INT32_MAX && saved > INT32_MIN + 1;  // the forward saturates to these two
    const double exponent = use_saved ? static_cast<double>(saved) : std::ceil(lse2);
    return {static_cast<float>(exponent), static_cast<float>(std::exp2(exponent - lse2)), delta};
  }

  void store(const View& view, const float* x, int64_t b, int64_t h, int64_t from, int64_t rows, float scale,
             const Scratch& s) const {
    for (int64_t r = 0; r < rows; ++r) s.row_scale[r] = scale;
    ops_.store(x, z_.ld, s.row_scale, rows, z_.head_dim, row_pointer(view, p_.dtype, b, h, from), p_.dtype,
               view.stride_s);
  }

  const BackwardParams& p_;
  const TileOps& ops_;
  Sizes z_;
  Mask mask_;
  float scale_;
  bool wants_dq_, wants_dkdv_;
};

// One worker, one kv head.
void run_head(const Backward& op, const Head& head, int64_t b, int64_t kv_head, Recipe recipe,
              const Scratch& s) {
  const Sizes& z = op.sizes();
  for (int64_t member = 0; member < z.group; ++member) {
    const int64_t h = kv_head * z.group + member;
    for (int64_t i = 0; i < z.tiles_q; ++i) op.load_queries(head, b, h, i, s);
    for (int64_t j = 0; j < z.tiles_k; ++j) {
      op.load_keys(head, b, kv_head, j, s);
      if (op.wants_dkdv() && member == 0) op.zero_keys(head, j);
      for (int64_t i = op.first_query_tile(j); i < z.tiles_q; ++i) {
        op.probabilities(head, i, j, op.wants_dkdv() ? recipe : Recipe::kFp4Qk, s);
        if (op.wants_dq()) op.add_dq(head, i, j, s);
        if (op.wants_dkdv()) op.add_dkdv(head, i, j, s);
      }
      if (op.wants_dkdv() && member == z.group - 1) op.store_dkdv(head, b, kv_head, j, s);
    }
    for (int64_t i = 0; op.wants_dq() && i < z.tiles_q; ++i) op.store_dq(head, b, h, i, s);
  }
}

// All workers, one kv head.
template <class ScratchAt>
void run_head_together(const Backward& op, const Head& head, int64_t b, int64_t kv_head, Recipe recipe,
                       ScratchAt scratch_at, const Executor& executor) {
  const Sizes& z = op.sizes();
  for_each_task(executor, z.tiles_k, [&](int worker, int64_t j) {
    op.load_keys(head, b, kv_head, j, scratch_at(worker));
    if (op.wants_dkdv()) op.zero_keys(head, j);
  });
  const int64_t dkdv_tasks = op.wants_dkdv() ? z.tiles_k : 0, dq_tasks = op.wants_dq() ? z.tiles_q : 0;
  for (int64_t member = 0; member < z.group; ++member) {
    const int64_t h = kv_head * z.group + member;
    for_each_task(executor, z.tiles_q,
                  [&](int worker, int64_t i) { op.load_queries(head, b, h, i, scratch_at(worker)); });
    // Heaviest first under a causal mask: the first key tiles, then the last query tiles.
    for_each_task(executor, dkdv_tasks + dq_tasks, [&](int worker, int64_t task) {
      const Scratch s = scratch_at(worker);
      if (task < dkdv_tasks) {
        for (int64_t i = op.first_query_tile(task); i < z.tiles_q; ++i) {
          op.probabilities(head, i, task, recipe, s);
          op.add_dkdv(head, i, task, s);
        }
        if (member == z.group - 1) op.store_dkdv(head, b, kv_head, task, s);
      } else {
        const int64_t i = z.tiles_q - 1 - (task - dkdv_tasks);
        for (int64_t j = 0; j < op.key_tiles(i); ++j) {
          op.probabilities(head, i, j, Recipe::kFp4Qk, s);
          op.add_dq(head, i, j, s);
        }
        op.store_dq(head, b, h, i, s);
      }
    });
  }
}

}  // namespace

size_t backward_workspace_bytes(const AttentionShape& shape, int workers) {
  if (shape.batch * shape.heads_kv * shape.heads_q == 0) return 0;
  const Sizes per_head(shape, Split::kPerHead), per_tile(shape, Split::kPerTile);
  const size_t own = bytes_of([&](Arena& a) { carve_head(a, per_head); });
  const size_t shared = bytes_of([&](Arena& a) { carve_head(a, per_tile); });
  const size_t scratch = bytes_of([&](Arena& a) { carve_scratch(a, per_head); });
  const size_t heads = own * static_cast<size_t>(head_workers(shape, workers));
  const bool may_share = workers > 1;
  return (may_share && shared > heads ? shared : heads) + scratch * static_cast<size_t>(workers);
}

void backward(const BackwardParams& p, void* workspace, const Executor& executor) {
  const AttentionShape& shape = p.shape;
  const int64_t kv_heads = shape.batch * shape.heads_kv;
  if (kv_heads * shape.heads_q == 0) return;
  const Split split = choose_split(shape, p.dq.data, p.dk.data, executor.workers);
  const Backward op(p, split);
  const Sizes& z = op.sizes();
  const size_t head_bytes = bytes_of([&](Arena& a) { carve_head(a, z); });
  const size_t scratch_bytes = bytes_of([&](Arena& a) { carve_scratch(a, z); });
  const int64_t heads = split == Split::kPerHead ? head_workers(shape, executor.workers) : 1;
  const auto scratch_at = [&](int worker) {
    return carve_at(static_cast<char*>(workspace) + head_bytes * heads, scratch_bytes, worker, carve_scratch,
                    z);
  };
  if (split == Split::kPerHead) {
    for_each_task(executor, kv_heads, [&](int worker, int64_t i) {
      const Head head = carve_at(workspace, head_bytes, worker, carve_head, z);
      run_head(op, head, i / shape.heads_kv, i % shape.heads_kv, p.recipe, scratch_at(worker));
    });
  } else {
    const Head head = carve_at(workspace, head_bytes, 0, carve_head, z);
    for (int64_t i = 0; i < kv_heads; ++i)
      run_head_together(op, head, i / shape.heads_kv, i % shape.heads_kv, p.recipe, scratch_at, executor);
  }
}

}  // namespace attn_qat::cpu
