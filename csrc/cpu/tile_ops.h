// FP32 tile primitives that the CPU kernels are made of, one set per instruction set. Tiles are row-major
// with a leading dimension in floats; `cols` is a multiple of 16 unless a line says otherwise.
#pragma once
#include "../params.h"

namespace attn_qat::cpu {

// Leading dimension of a scratch tile: one block of padding keeps power-of-two widths off the same cache
// sets.
constexpr int64_t padded(int64_t cols) { return cols + 16; }

// What one row needs to turn scores into probabilities (contract sections 3 and 4).
struct RowStatistics {
  float exponent;    // E
  float normaliser;  // 2^E * exp(-lse); 0 for a row with no visible key
  float delta;       // rowsum(O_hp * dO)
};

struct Gemm {
  int64_t m, n, k;  // n a multiple of 16
  const float* a;   // a(i, l) at a[i * a_stride_m + l * a_stride_k]
  int64_t a_stride_m, a_stride_k;
  const float* b;  // b(l, j) at b[l * ldb + j]
  int64_t ldb;
  float* c;  // c(i, j) at c[i * ldc + j]
  int64_t ldc;
  bool accumulate;  // c += a b instead of c = a b; each element sums over k in order either way
};

struct TileOps {
  const char* name;

  // Any cols. dst gets zeros up to the next multiple of 16.
  void (*load)(const void* src, DType dtype, int64_t src_stride, int64_t rows, int64_t cols, float* dst,
               int64_t ld);
  // Any cols. Stores src * row_scale[row] (1 when nullptr), rounded once.
  void (*store)(const float* src, int64_t ld, const float* row_scale, int64_t rows, int64_t cols, void* dst,
                DType dtype, int64_t dst_stride);
  void (*transpose)(const float* src, int64_t ld, int64_t rows, int64_t cols, float* dst, int64_t dst_ld);
  void (*gemm)(const Gemm&);

  // NVFP4 fake quantisation in place: blocks along a row, or down the columns (rows a multiple of 16).
  void (*fake_quantize_rows)(float* x, int64_t ld, int64_t rows, int64_t cols);
  void (*fake_quantize_columns)(float* x, int64_t ld, int64_t rows, int64_t cols);

  // t = scale * s in place, -inf from column limit(row) = first_limit + row on; row_max[row] = max(itself,
  // t).
  void (*scale_and_mask)(float* s, int64_t ld, int64_t rows, int64_t cols, float scale, int64_t first_limit,
                         bool causal, float* row_max);
  // p = exp2(t - exponent[row]) in place; row_sum[row] += p; quantised = fp4(p * 2^gain) * 2^-gain when not
  // nullptr.
  void (*forward_probabilities)(float* t, int64_t ld, int64_t rows, int64_t cols, const float* exponent,
                                int gain, float* quantised, float* row_sum);
  // From scores s and dp: ds = bf16(p * (dp - delta)) over dp, and the left operand of dV over s:
  // p, fp4(p) or fp4(exp2(t - E) * 2^gain) * 2^-gain * normaliser, by recipe. Masked entries become 0.
  void (*backward_probabilities)(float* s, float* dp, int64_t ld, int64_t rows, int64_t cols, float scale,
                                 int64_t first_limit, bool causal, const RowStatistics* statistics,
                                 Recipe recipe);
  // delta[row] = sum over cols of a * b.
  void (*row_dot)(const float* a, const float* b, int64_t ld, int64_t rows, int64_t cols, float* dot);
};

// The widest set that this processor runs, decided once.
const TileOps& tile_ops();

// Every set compiled in that this processor runs, widest first; ends with nullptr.
const TileOps* const* available_tile_ops();

}  // namespace attn_qat::cpu
