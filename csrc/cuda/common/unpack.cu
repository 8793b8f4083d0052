// dequantize: codes and scales (format/nvfp4.h) become values, code * scale * global scale, rounded once.
// Threads are laid out as in pack.cu, but a lane writes 16 bytes at a time at most: wider ones would leave
// half sectors.
#include <cuda_runtime.h>

#include "cuda/common/packed.cuh"
#include "cuda/common/tiling.cuh"
#include "cuda/common/values.cuh"
#include "cuda/launch.h"
#include "cuda/tile/quantize.cuh"
#include "format/nvfp4.h"

namespace attn_qat::common {
namespace {

using nvfp4::kBlock;

constexpr int kThreads = 256, kSteps = 4;

// The codes of the chunk of lane `lane`.
template <class T, int kWords>
__device__ __forceinline__ uint32_t load_codes(const uint8_t* from, int64_t lane) {
  constexpr int kValues = Chunk<T, kWords>::kValues;
  if constexpr (kValues == 1)
    return __ldg(from) >> (lane % 2 * 4);
  else
    return __ldg(reinterpret_cast<const Word<kValues / 2>*>(from));
}

template <class T, int kWords, bool kFlat>
__global__ void __launch_bounds__(kThreads)
    dequantize_along_cols(const __grid_constant__ QuantizeParams p,
                          const __grid_constant__ PackedLayout layout, const __grid_constant__ Tiling t) {
  using Values = Chunk<T, kWords>;
  const Place<kFlat, kThreads, kSteps> at(t, p.cols / Values::kValues, p.rows);
  const int64_t col = at.lane * Values::kValues;
  T* out = head_pointer<T>(p, at.head) + at.line * p.x.stride_s + col;
  const uint8_t* data = layout.code_bytes(at.head, at.line, col / 2);
  uint32_t codes[kSteps];
  uint8_t scales[kSteps];
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    const bool inside = at.inside(k);
    codes[k] = inside ? load_codes<T, kWords>(data + at.offset(k, Values::kValues, p.cols) / 2, at.lane) : 0u;
    scales[k] = inside ? __ldg(layout.scale<Values::kLanes>(at, k)) : uint8_t{0};
  }
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    float x[Values::kFloats];
    tile::e2m1_values(codes[k], tile::e4m3_value(scales[k]), x);
    multiply(x, p.global_scale);
    if (at.inside(k)) Values::from_floats(x).store(out + at.offset(k, Values::kValues, p.x.stride_s));
  }
}

constexpr int kHalf = tile::kCodesPerWord;  // rows that a lane has in registers: those of a word of codes

// One or two columns, lines `line` and `line` + 1 of the tile, become word `word` of half their rows.
template <class Tile, class T, int kWords>
__device__ __forceinline__ void dequantize_columns(Tile& tile, int line, int group, int half,
                                                   const float* global_scale, Chunk<T, kWords> (&rows)[kHalf],
                                                   int word) {
  constexpr int kColumns = kPerWord<T> < Chunk<T, kWords>::kValues ? kPerWord<T> : Chunk<T, kWords>::kValues;
  float x[kPerWord<T>][kHalf] = {};
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    const uint2& codes = tile.codes_at(line + c, group);
    tile::e2m1_values(half == 0 ? codes.x : codes.y, tile::e4m3_value(tile.scale_at(line + c, group)), x[c]);
    multiply(x[c], global_scale);
  }
#pragma unroll
  for (int r = 0; r < kHalf; ++r) {
    float of_row[kPerWord<T>];
#pragma unroll
    for (int c = 0; c < kPerWord<T>; ++c) of_row[c] = x[c][r];
    rows[r].words[word] = pack<T>(of_row);
  }
}

template <class T, int kWords>
__global__ void __launch_bounds__(kRowThreads)
    dequantize_along_rows(const __grid_constant__ QuantizeParams p,
                          const __grid_constant__ PackedLayout layout, const __grid_constant__ Tiling t,
                          bool wide_blocks) {
  using Rows = RowTile<T, kWords>;
  using Values = typename Rows::Values;
  __shared__ typename Rows::Packed packed;
  const Rows at(p, t);
  const auto load = [](auto* here, const auto* there) { *here = __ldg(there); };
  if (wide_blocks)
    for_each_code_unit<uint2, kRowThreads>(packed, layout, at.origin, load);
  else
    for_each_code_unit<uint8_t, kRowThreads>(packed, layout, at.origin, load);
  for_each_scale<kRowThreads>(packed, layout, at.origin, load);
  __syncthreads();  // the tile is whole; what lies outside the tensor is decoded too, and not stored

  T* out = head_pointer<T>(p, at.origin.head) + at.row() * p.x.stride_s + at.col();
  const int64_t rows = at.col() < p.cols ? p.rows - at.row() : 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    Values values[kHalf];
#pragma unroll
    for (int word = 0; word < kWords; ++word)
      dequantize_columns(packed, at.line() + word * kPerWord<T>, at.group, half, p.global_scale, values,
                         word);
#pragma unroll
    for (int r = 0; r < kHalf; ++r) {
      if (half * kHalf + r < rows) values[r].store(out + (half * kHalf + r) * p.x.stride_s);
    }
  }
}

template <class T, int kWords, bool kFlat>
cudaError_t launch_along_cols(const QuantizeParams& p, cudaStream_t stream) {
  const Tiling tiling = Tiling::along_cols(p, kFlat, Chunk<T, kWords>::kLanes, kThreads, kSteps);
  return launch_tiles(dequantize_along_cols<T, kWords, kFlat>, tiling, kThreads, stream, p, PackedLayout(p),
                      tiling);
}

template <class T, int kWords>
cudaError_t launch_along_rows(const QuantizeParams& p, cudaStream_t stream) {
  const Tiling tiling = RowTile<T, kWords>::tiling(p);
  const PackedLayout layout(p);
  return launch_tiles(dequantize_along_rows<T, kWords>, tiling, kRowThreads, stream, p, layout, tiling,
                      has_wide_blocks(layout));
}

template <class T>
cudaError_t launch(const QuantizeParams& p, cudaStream_t stream) {
  const bool wide_rows = has_wide_rows(p, Chunk<T, 4>::kValues);
  if (p.along_rows)
    return wide_rows ? launch_along_rows<T, 4>(p, stream) : launch_along_rows<T, 1>(p, stream);
  const bool wide = wide_rows && is_aligned(p.data, Chunk<T, 4>::kValues / 2);
  if (is_flat(p)) {
    const QuantizeParams flat = flattened(p);
    return wide ? launch_along_cols<T, 4, true>(flat, stream) : launch_along_cols<T, 1, true>(flat, stream);
  }
  return wide ? launch_along_cols<T, 4, false>(p, stream) : launch_along_cols<T, 1, false>(p, stream);
}

}  // namespace

cudaError_t dequantize(const QuantizeParams& p, cudaStream_t stream) {
  if (is_empty(p)) return cudaSuccess;
  switch (p.dtype) {
    case DType::kBFloat16: return launch<__nv_bfloat16>(p, stream);
    case DType::kFloat16: return launch<__half>(p, stream);
    case DType::kFloat32: return launch<float>(p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace attn_qat::common
