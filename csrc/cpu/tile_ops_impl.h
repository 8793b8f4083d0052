// Bodies of the tile primitives. Included once per instruction set, inside a namespace of its own; the
// compiler's target flags decide the vector width. Elementwise loops are plain and left to the vectoriser;
// reductions and blocks of 16 are written with vectors, since the compiler may not reorder sums and
// vectorises across short blocks badly.
#include "../format/nvfp4.h"
#include "tile_ops.h"

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace attn_qat::cpu::ATTN_QAT_ISA {

using nvfp4::kBlock;

// ---- vectors for the matrix product ----

#if defined(__AVX512F__)
using Vector = __m512;
constexpr int kWidth = 16, kMaxRows = 8, kMaxVectors = 2;
ATTN_QAT_HD Vector load_vector(const float* p) { return _mm512_loadu_ps(p); }
ATTN_QAT_HD void store_vector(float* p, Vector v) { _mm512_storeu_ps(p, v); }
ATTN_QAT_HD Vector broadcast(float x) { return _mm512_set1_ps(x); }
ATTN_QAT_HD Vector multiply_add(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
#elif defined(__AVX2__)
using Vector = __m256;
constexpr int kWidth = 8, kMaxRows = 6, kMaxVectors = 2;
ATTN_QAT_HD Vector load_vector(const float* p) { return _mm256_loadu_ps(p); }
ATTN_QAT_HD void store_vector(float* p, Vector v) { _mm256_storeu_ps(p, v); }
ATTN_QAT_HD Vector broadcast(float x) { return _mm256_set1_ps(x); }
ATTN_QAT_HD Vector multiply_add(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
#else
typedef float Vector __attribute__((vector_size(16)));
typedef float UnalignedVector __attribute__((vector_size(16), aligned(4), may_alias));
constexpr int kWidth = 4, kMaxRows = 4, kMaxVectors = 2;
ATTN_QAT_HD Vector load_vector(const float* p) { return *reinterpret_cast<const UnalignedVector*>(p); }
ATTN_QAT_HD void store_vector(float* p, Vector v) { *reinterpret_cast<UnalignedVector*>(p) = v; }
ATTN_QAT_HD Vector broadcast(float x) { return Vector{x, x, x, x}; }
ATTN_QAT_HD Vector multiply_add(Vector a, Vector b, Vector c) { return a * b + c; }
#endif

template <int kRows, int kVectors>
ATTN_QAT_HD void multiply_panel(const Gemm& g, const float* a, const float* b, float* c) {
  Vector sum[kRows][kVectors];
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < kVectors; ++j)
      sum[i][j] = g.accumulate ? load_vector(c + i * g.ldc + j * kWidth) : broadcast(0.0f);
  for (int64_t l = 0; l < g.k; ++l, a += g.a_stride_k, b += g.ldb) {
    Vector row[kVectors];
    for (int j = 0; j < kVectors; ++j) row[j] = load_vector(b + j * kWidth);
    for (int i = 0; i < kRows; ++i) {
      const Vector left = broadcast(a[i * g.a_stride_m]);
      for (int j = 0; j < kVectors; ++j) sum[i][j] = multiply_add(left, row[j], sum[i][j]);
    }
  }
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < kVectors; ++j) store_vector(c + i * g.ldc + j * kWidth, sum[i][j]);
}

template <int kVectors, int kRows>
void multiply_rows(const Gemm& g, const float* b, float* c, int64_t row) {
  const int64_t rows = g.m - row < kRows ? g.m - row : kRows;
  if (rows == kRows) {
    multiply_panel<kRows, kVectors>(g, g.a + row * g.a_stride_m, b, c + row * g.ldc);
  } else if constexpr (kRows > 1) {
    multiply_rows<kVectors, kRows - 1>(g, b, c, row);
  }
}

template <int kVectors>
int64_t multiply_columns(const Gemm& g, int64_t col) {
  for (; col + kVectors * kWidth <= g.n; col += kVectors * kWidth)
    for (int64_t row = 0; row < g.m; row += kMaxRows)
      multiply_rows<kVectors, kMaxRows>(g, g.b + col, g.c + col, row);
  return col;
}

void gemm(const Gemm& g) { multiply_columns<1>(g, multiply_columns<kMaxVectors>(g, 0)); }

// ---- conversions ----

template <class Convert, class T>
ATTN_QAT_HD void load_as(const T* __restrict src, int64_t stride, int64_t rows, int64_t cols,
                         float* __restrict dst, int64_t ld, Convert convert) {
  const int64_t full = (cols + kBlock - 1) / kBlock * kBlock;
  for (int64_t r = 0; r < rows; ++r, src += stride, dst += ld) {
    for (int64_t c = 0; c < cols; ++c) dst[c] = convert(src[c]);
    for (int64_t c = cols; c < full; ++c) dst[c] = 0.0f;
  }
}

void load(const void* src, DType dtype, int64_t stride, int64_t rows, int64_t cols, float* dst, int64_t ld) {
  const auto* half = static_cast<const uint16_t*>(src);
  if (dtype == DType::kBFloat16)
    load_as(half, stride, rows, cols, dst, ld, [](uint16_t x) { return bfloat16_to_float(x); });
  else if (dtype == DType::kFloat16)
    load_as(half, stride, rows, cols, dst, ld, [](uint16_t x) { return float16_to_float(x); });
  else
    load_as(static_cast<const float*>(src), stride, rows, cols, dst, ld, [](float x) { return x; });
}

template <class Convert, class T>
ATTN_QAT_HD void store_as(const float* __restrict src, int64_t ld, const float* row_scale, int64_t rows,
                          int64_t cols, T* __restrict dst, int64_t stride, Convert convert) {
  for (int64_t r = 0; r < rows; ++r, src += ld, dst += stride) {
    const float scale = row_scale ? row_scale[r] : 1.0f;
    for (int64_t c = 0; c < cols; ++c) dst[c] = convert(src[c] * scale);
  }
}

void store(const float* src, int64_t ld, const float* row_scale, int64_t rows, int64_t cols, void* dst,
           DType dtype, int64_t stride) {
  auto* half = static_cast<uint16_t*>(dst);
  if (dtype == DType::kBFloat16)
    store_as(src, ld, row_scale, rows, cols, half, stride, [](float x) { return float_to_bfloat16(x); });
  else if (dtype == DType::kFloat16)
    store_as(src, ld, row_scale, rows, cols, half, stride, [](float x) { return float_to_float16(x); });
  else
    store_as(src, ld, row_scale, rows, cols, static_cast<float*>(dst), stride, [](float x) { return x; });
}

void transpose(const float* src, int64_t ld, int64_t rows, int64_t cols, float* dst, int64_t dst_ld) {
  constexpr int64_t kTile = 16;  // a tile of both sides stays in the first-level cache
  for (int64_t r0 = 0; r0 < rows; r0 += kTile)
    for (int64_t c0 = 0; c0 < cols; c0 += kTile)
      for (int64_t c = c0; c < c0 + kTile && c < cols; ++c)
        for (int64_t r = r0; r < r0 + kTile && r < rows; ++r) dst[c * dst_ld + r] = src[r * ld + c];
}

// ---- lanes ----

typedef int32_t Lanes __attribute__((vector_size(kWidth * 4), may_alias));
constexpr int kPerBlock = kBlock / kWidth;  // vectors in a block of 16

ATTN_QAT_HD Vector larger(Vector a, Vector b) { return a > b ? a : b; }

// Lane i exchanged with lane i ^ step. A table, because the compiler builds such index vectors lane by lane.
struct LaneSwaps {
  alignas(64) int32_t from[kWidth][kWidth];
  constexpr LaneSwaps() : from() {
    for (int step = 0; step < kWidth; ++step)
      for (int i = 0; i < kWidth; ++i) from[step][i] = i ^ step;
  }
};
constexpr LaneSwaps kLaneSwaps;

template <class V>
ATTN_QAT_HD V swap_lanes(V v, int step) {
  return __builtin_shuffle(v, *reinterpret_cast<const Lanes*>(kLaneSwaps.from[step]));
}

ATTN_QAT_HD float sum_lanes(Vector v) {
  for (int step = kWidth / 2; step > 0; step /= 2) v += swap_lanes(v, step);
  return v[0];
}

ATTN_QAT_HD float max_lanes(Vector v) {
  for (int step = kWidth / 2; step > 0; step /= 2) v = larger(v, swap_lanes(v, step));
  return v[0];
}

// Magnitudes as integers, so that NaN and Inf come out on top.
ATTN_QAT_HD Lanes magnitudes(Vector v) { return (Lanes)v & 0x7fffffff; }
ATTN_QAT_HD Lanes larger(Lanes a, Lanes b) { return a > b ? a : b; }

ATTN_QAT_HD float row_sum(const float* x, int64_t cols) {
  Vector sum[kPerBlock] = {};
  for (int64_t c = 0; c < cols; c += kBlock)
    for (int j = 0; j < kPerBlock; ++j) sum[j] += load_vector(x + c + j * kWidth);
  for (int j = 1; j < kPerBlock; ++j) sum[0] += sum[j];
  return sum_lanes(sum[0]);
}

// ---- quantisation ----

ATTN_QAT_HD Vector fake_quantize(Vector x, Vector scale) {
  const Vector magnitude = nvfp4::e2m1_magnitude((Vector)magnitudes(x), scale) * scale;
  return (Vector)((Lanes)magnitude | ((Lanes)x & INT32_MIN));
}

ATTN_QAT_HD uint32_t block_amax(const float* x) {
  Lanes amax = magnitudes(load_vector(x));
  for (int j = 1; j < kPerBlock; ++j) amax = larger(amax, magnitudes(load_vector(x + j * kWidth)));
  for (int step = kWidth / 2; step > 0; step /= 2) amax = larger(amax, swap_lanes(amax, step));
  return static_cast<uint32_t>(amax[0]);
}

// dst = fp4(x * gain) * inverse_gain over one row. gain is a power of two: both products are exact.
ATTN_QAT_HD void quantize_row(const float* x, int64_t cols, float gain, float inverse_gain, float* dst) {
  constexpr int64_t kBatch = 16;  // blocks whose scales are computed together
  float amax[kBatch] = {}, scale[kBatch];
  for (int64_t start = 0; start < cols; start += kBatch * kBlock) {
    const int64_t left = (cols - start) / kBlock, blocks = left < kBatch ? left : kBatch;
    for (int64_t g = 0; g < blocks; ++g) amax[g] = bits_float(block_amax(x + start + g * kBlock)) * gain;
    for (int64_t g = 0; g < kBatch; ++g) scale[g] = nvfp4::block_scale(nvfp4::magnitude_bits(amax[g]));
    for (int64_t g = 0; g < blocks; ++g) {
      const Vector s = broadcast(scale[g]);
      for (int j = 0; j < kPerBlock; ++j) {
        const int64_t c = start + g * kBlock + j * kWidth;
        store_vector(dst + c, fake_quantize(load_vector(x + c) * gain, s) * inverse_gain);
      }
    }
  }
}

void fake_quantize_rows(float* x, int64_t ld, int64_t rows, int64_t cols) {
  for (int64_t r = 0; r < rows; ++r) quantize_row(x + r * ld, cols, 1.0f, 1.0f, x + r * ld);
}

void fake_quantize_columns(float* x, int64_t ld, int64_t rows, int64_t cols) {
  for (int64_t r = 0; r < rows; r += kBlock) {
    for (int64_t c = 0; c < cols; c += kWidth) {
      float* tile = x + r * ld + c;
      Lanes amax = {};
      for (int i = 0; i < kBlock; ++i) amax = larger(amax, magnitudes(load_vector(tile + i * ld)));
      float scale[kWidth];
      for (int i = 0; i < kWidth; ++i) scale[i] = nvfp4::block_scale(static_cast<uint32_t>(amax[i]));
      const Vector s = load_vector(scale);
      for (int i = 0; i < kBlock; ++i)
        store_vector(tile + i * ld, fake_quantize(load_vector(tile + i * ld), s));
    }
  }
}

// ---- softmax ----

ATTN_QAT_HD float fused(float a, float b, float c) {
#if defined(__FMA__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

// 2^x within 2 ulp; 0 below 2^-126, clamped above 2^127; NaN stays NaN.
ATTN_QAT_HD float exp2_flush(float x) {
  const float low = x < -126.0f ? -126.0f : x;
  const float clamped = low > 127.0f ? 127.0f : low;
  const float shifted = clamped + 0x1.8p23f;  // its low bits are the nearest integer
  const float f = clamped - (shifted - 0x1.8p23f);
  // Minimax for the relative error on [-0.5, 0.5]: 2e-9 before rounding.
  float p = 0x1.41fbbcp-13f;
  p = fused(p, f, 0x1.5f3e54p-10f);
  p = fused(p, f, 0x1.3b2d4cp-7f);
  p = fused(p, f, 0x1.c6aee8p-5f);
  p = fused(p, f, 0x1.ebfbdcp-3f);
  p = fused(p, f, 0x1.62e430p-1f);
  p = fused(p, f, 1.0f);
  const float power = bits_float((float_bits(shifted) + 127u) << 23);
  return x < -126.0f ? 0.0f : p * power;
}

// Columns of this row that are visible: all, or those before the causal limit.
ATTN_QAT_HD int64_t visible_columns(int64_t cols, int64_t first_limit, bool causal, int64_t row) {
  const int64_t limit = causal ? first_limit + row : first_limit;
  return limit < 0 ? 0 : limit < cols ? limit : cols;
}

void scale_and_mask(float* s, int64_t ld, int64_t rows, int64_t cols, float scale, int64_t first_limit,
                    bool causal, float* row_max) {
  for (int64_t r = 0; r < rows; ++r, s += ld) {
    const int64_t visible = visible_columns(cols, first_limit, causal, r);
    for (int64_t c = 0; c < visible; ++c) s[c] *= scale;
    for (int64_t c = visible; c < cols; ++c) s[c] = -__builtin_inff();
    Vector top = broadcast(row_max[r]);
    for (int64_t c = 0; c < cols; c += kWidth) top = larger(load_vector(s + c), top);
    row_max[r] = max_lanes(top);
  }
}

void forward_probabilities(float* t, int64_t ld, int64_t rows, int64_t cols, const float* exponent, int gain,
                           float* quantised, float* sum) {
  const float up = static_cast<float>(1 << gain), down = 1.0f / up;
  for (int64_t r = 0; r < rows; ++r, t += ld) {
    const float e = exponent[r];
    for (int64_t c = 0; c < cols; ++c) t[c] = exp2_flush(t[c] - e);
    sum[r] += row_sum(t, cols);
    if (quantised) quantize_row(t, cols, up, down, quantised + r * ld);
  }
}

void backward_probabilities(float* __restrict s, float* __restrict dp, int64_t ld, int64_t rows, int64_t cols,
                            float scale, int64_t first_limit, bool causal, const RowStatistics* statistics,
                            Recipe recipe) {
  const float up = static_cast<float>(1 << probability_gain(recipe)), down = 1.0f / up;
  for (int64_t r = 0; r < rows; ++r, s += ld, dp += ld) {
    const RowStatistics row = statistics[r];
    const int64_t visible = visible_columns(cols, first_limit, causal, r);
    // Recipe fp4 quantises the unnormalised p; its normaliser is applied after.
    const float before = recipe == Recipe::kFp4 ? 1.0f : row.normaliser;
    for (int64_t c = 0; c < visible; ++c) {
      const float p = exp2_flush(s[c] * scale - row.exponent);
      dp[c] = round_to_bfloat16(p * row.normaliser * (dp[c] - row.delta));
      s[c] = p * before;
    }
    for (int64_t c = visible; c < cols; ++c) s[c] = dp[c] = 0.0f;
    if (recipe == Recipe::kCudnn) quantize_row(s, cols, 1.0f, 1.0f, s);
    if (recipe == Recipe::kFp4) {
      quantize_row(s, cols, up, down, s);
      for (int64_t c = 0; c < cols; ++c) s[c] *= row.normaliser;
    }
  }
}

void row_dot(const float* a, const float* b, int64_t ld, int64_t rows, int64_t cols, float* dot) {
  for (int64_t r = 0; r < rows; ++r, a += ld, b += ld) {
    Vector sum[kPerBlock] = {};
    for (int64_t c = 0; c < cols; c += kBlock)
      for (int j = 0; j < kPerBlock; ++j)
        sum[j] = multiply_add(load_vector(a + c + j * kWidth), load_vector(b + c + j * kWidth), sum[j]);
    for (int j = 1; j < kPerBlock; ++j) sum[0] += sum[j];
    dot[r] = sum_lanes(sum[0]);
  }
}

const TileOps kOps = {ATTN_QAT_ISA_NAME,
                      load,
                      store,
                      transpose,
                      gemm,
                      fake_quantize_rows,
                      fake_quantize_columns,
                      scale_and_mask,
                      forward_probabilities,
                      backward_probabilities,
                      row_dot};

}  // namespace attn_qat::cpu::ATTN_QAT_ISA
