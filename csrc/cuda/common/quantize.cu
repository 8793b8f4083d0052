// fake_quantize: every block of 16 values becomes code * scale (format/nvfp4.h), in one pass over memory.
//
// Along columns (axis -1)               Along rows (axis -2)
//   lane 0 | lane 1 | lane 0 | ...        lane 0 | lane 1 | ...      16 rows of V columns in each lane:
//   V values each; 16 / V lanes           row 0                      a block lies within one lane,
//   hold a block and exchange             ...                        rows are read side by side
//   its largest magnitude                 row 15
//
// V values are 16 bytes where addresses allow it, else one. A block's missing tail counts as zeros.
#include <cuda_runtime.h>

#include "cuda/common/tiling.cuh"
#include "cuda/common/values.cuh"
#include "cuda/launch.h"
#include "cuda/tile/quantize.cuh"
#include "format/nvfp4.h"

namespace attn_qat::common {
namespace {

using nvfp4::kBlock;

constexpr int kThreads = 256, kSteps = 4;  // along columns: loads that a thread has in flight
constexpr int kRowThreads = 128;           // along rows: a thread holds 256 bytes; four thread blocks fit

template <class T, int kWords, bool kFlat>
__global__ void __launch_bounds__(kThreads)
    fake_quantize_along_cols(const __grid_constant__ QuantizeParams p, const __grid_constant__ Tiling t) {
  using Values = Chunk<T, kWords>;
  const Place<kFlat, kThreads, kSteps> at(t, p.cols / Values::kValues, p.rows);
  const int64_t col = at.lane * Values::kValues;
  const T* in = head_pointer<const T>(p, at.head) + at.line * p.x.stride_s + col;
  T* out = static_cast<T*>(p.out) + (at.head * p.rows + at.line) * p.cols + col;
  Values values[kSteps];
#pragma unroll
  for (int k = 0; k < kSteps; ++k)
    values[k] = at.inside(k) ? Values::load(in + at.offset(k, Values::kValues, p.x.stride_s)) : Values{};
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    const uint32_t amax = divide_bits(amax_bits(values[k]), p.global_scale);
    float x[Values::kFloats];
    values[k].to_floats(x);
    divide(x, p.global_scale);
    tile::fake_quantize(x, tile::block_scale(amax));
    multiply(x, p.global_scale);
    if (at.inside(k)) Values::from_floats(x).store(out + at.offset(k, Values::kValues, p.cols));
  }
}

// Word `word` of 16 rows: one or two columns, a block each.
template <class T, int kWords>
__device__ __forceinline__ void fake_quantize_columns(Chunk<T, kWords> (&rows)[kBlock], int word,
                                                      const float* global_scale) {
  constexpr int kColumns = kPerWord<T>;
  float amax[kColumns], x[kColumns][kBlock];
  column_amax(rows, word, amax);
#pragma unroll
  for (int r = 0; r < kBlock; ++r) {
    float of_row[kColumns];
    unpack<T>(rows[r].words[word], of_row);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) x[c][r] = of_row[c];
  }
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    divide(x[c], global_scale);
    tile::fake_quantize(x[c], tile::block_scale(divide_bits(float_bits(amax[c]), global_scale)));
    multiply(x[c], global_scale);
  }
#pragma unroll
  for (int r = 0; r < kBlock; ++r) {
    float of_row[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) of_row[c] = x[c][r];
    rows[r].words[word] = pack<T>(of_row);
  }
}

template <class T, int kWords>
__global__ void __launch_bounds__(kRowThreads, 4)
    fake_quantize_along_rows(const __grid_constant__ QuantizeParams p, const __grid_constant__ Tiling t) {
  using Values = Chunk<T, kWords>;
  const Place<false, kRowThreads, 1> at(t, p.cols / Values::kValues, ceil_div(p.rows, kBlock));
  if (!at.inside(0)) return;
  const int64_t col = at.lane * Values::kValues, first_row = at.line * kBlock;
  const int rows = static_cast<int>(min(p.rows - first_row, static_cast<int64_t>(kBlock)));
  const T* in = head_pointer<const T>(p, at.head) + first_row * p.x.stride_s + col;
  T* out = static_cast<T*>(p.out) + (at.head * p.rows + first_row) * p.cols + col;
  Values values[kBlock];
#pragma unroll
  for (int r = 0; r < kBlock; ++r) values[r] = r < rows ? Values::load(in + r * p.x.stride_s) : Values{};
#pragma unroll
  for (int word = 0; word < kWords; ++word) fake_quantize_columns(values, word, p.global_scale);
#pragma unroll
  for (int r = 0; r < kBlock; ++r) {
    if (r < rows) values[r].store(out + r * p.cols);
  }
}

template <class T, int kWords, bool kFlat>
cudaError_t launch_along_cols(const QuantizeParams& p, cudaStream_t stream) {
  const Tiling tiling = Tiling::along_cols(p, kFlat, Chunk<T, kWords>::kLanes, kThreads, kSteps);
  return launch_tiles(fake_quantize_along_cols<T, kWords, kFlat>, tiling, kThreads, stream, p, tiling);
}

template <class T, int kWords>
cudaError_t launch_along_rows(const QuantizeParams& p, cudaStream_t stream) {
  const Tiling tiling(ceil_div(p.cols, Chunk<T, kWords>::kValues), ceil_div(p.rows, kBlock),
                      p.outer0 * p.outer1, kRowThreads, 1);
  return launch_tiles(fake_quantize_along_rows<T, kWords>, tiling, kRowThreads, stream, p, tiling);
}

template <class T>
cudaError_t launch(const QuantizeParams& p, cudaStream_t stream) {
  const bool wide = has_wide_rows(p, Chunk<T, 4>::kValues) && is_aligned(p.out, 16);
  if (p.along_rows) return wide ? launch_along_rows<T, 4>(p, stream) : launch_along_rows<T, 1>(p, stream);
  if (is_flat(p)) {
    const QuantizeParams flat = flattened(p);
    return wide ? launch_along_cols<T, 4, true>(flat, stream) : launch_along_cols<T, 1, true>(flat, stream);
  }
  return wide ? launch_along_cols<T, 4, false>(p, stream) : launch_along_cols<T, 1, false>(p, stream);
}

}  // namespace

const char* why_not(const QuantizeParams& p) {
  // No tile of any kernel is smaller than one block of 16 values by 16 lines.
  if (is_empty(p) || is_flat(p)) return nullptr;
  const int64_t tiles = p.outer0 * p.outer1 * ceil_div(p.rows, kBlock) * ceil_div(p.cols, kBlock);
  return tiles > kMaxTiles ? "takes at most 2^31 - 1 tiles of 16 by 16 values" : nullptr;
}

cudaError_t fake_quantize(const QuantizeParams& p, cudaStream_t stream) {
  if (is_empty(p)) return cudaSuccess;
  switch (p.dtype) {
    case DType::kBFloat16: return launch<__nv_bfloat16>(p, stream);
    case DType::kFloat16: return launch<__half>(p, stream);
    case DType::kFloat32: return launch<float>(p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace attn_qat::common
