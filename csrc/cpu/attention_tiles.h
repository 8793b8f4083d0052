// What the attention kernels share: tile sizes, addressing, masks, workspace.
#pragma once
#include "tile_ops.h"

namespace attn_qat::cpu {

constexpr int64_t kTileQ = 64;  // query rows of a tile
constexpr int64_t kTileK =
    128;  // keys of a tile: whole blocks of 16, so a block of P or V never straddles tiles
constexpr size_t kCacheLine = 64;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }
inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

inline char* row_pointer(const View& view, DType dtype, int64_t b, int64_t h, int64_t s) {
  return static_cast<char*>(view.data) +
         (b * view.stride_b + h * view.stride_h + s * view.stride_s) * dtype_bytes(dtype);
}

// Bottom-right causal mask: query i sees keys j <= i + seq_k - seq_q.
struct Mask {
  int64_t seq_q, seq_k;
  bool causal;

  // First key that row i does not see, relative to key `from`; with causal, one more for each further row.
  int64_t first_limit(int64_t i, int64_t from) const {
    return (causal ? i + 1 + seq_k - seq_q : seq_k) - from;
  }
  // Keys that some row below `end` sees.
  int64_t visible_keys(int64_t end) const {
    if (!causal) return seq_k;
    const int64_t keys = smaller(end, seq_q) + seq_k - seq_q;
    return keys < 0 ? 0 : keys;
  }
};

// Hands out FP32 arrays from a byte range; with a null base it only measures.
class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<char*>(base)) {}
  float* floats(int64_t count) {
    char* p = base_ + used_;
    used_ += (static_cast<size_t>(count) * sizeof(float) + kCacheLine - 1) / kCacheLine * kCacheLine;
    return reinterpret_cast<float*>(p);
  }
  size_t used() const { return used_; }

 private:
  char* base_;
  size_t used_ = 0;
};

template <class Carve>
size_t bytes_of(Carve carve) {
  Arena arena(nullptr);
  carve(arena);
  return arena.used();
}

// The i-th of the equal pieces of a workspace.
template <class Carve, class Sizes>
auto carve_at(void* base, size_t bytes, int64_t i, Carve carve, const Sizes& sizes) {
  Arena arena(static_cast<char*>(base) + bytes * static_cast<size_t>(i));
  return carve(arena, sizes);
}

// Fake-quantises a tile of V by recipe: along the head dimension, along the keys, or not at all.
inline void quantize_v_tile(const TileOps& ops, Recipe recipe, float* v, int64_t ld, int64_t rows,
                            int64_t head_dim) {
  if (recipe == Recipe::kCudnn) ops.fake_quantize_rows(v, ld, rows, head_dim);
  if (recipe == Recipe::kFp4) ops.fake_quantize_columns(v, ld, rows, head_dim);
}

// Loads `rows` rows of one head from row `from`, and zeros up to the next multiple of 16 rows.
inline void load_tile(const TileOps& ops, const View& view, DType dtype, int64_t b, int64_t h, int64_t from,
                      int64_t rows, int64_t head_dim, float* tile, int64_t ld) {
  ops.load(row_pointer(view, dtype, b, h, from), dtype, view.stride_s, rows, head_dim, tile, ld);
  for (int64_t r = rows; r < round_up(rows, 16); ++r)
    for (int64_t c = 0; c < head_dim; ++c) tile[r * ld + c] = 0.0f;
}

}  // namespace attn_qat::cpu
