// quantize: every block of 16 values becomes 16 codes of four bits and an E4M3 scale (format/nvfp4.h).
//
// Along columns (axis -1) lanes lie along a row and share a block; of a flat tensor a lane holds 32 bytes,
// which is a block of 16-bit values. Along rows (axis -2) a lane holds 16 rows of a few columns; packed
// lines are columns, so tiles of blocks go through shared memory. Where rows are not whole chunks on
// 16-byte boundaries, lanes hold single values.
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

constexpr int kThreads = 256;

// Chunks of a thread: four loads in flight, of which a chunk of 8 words takes two.
template <int kWords>
constexpr int kSteps = kWords == 8 ? 2 : 4;

template <class T, int kWords>
__device__ __forceinline__ uint32_t word_or_zero(const Chunk<T, kWords>& values, int i) {
  return i < kWords ? values.words[i < kWords ? i : 0] : 0u;
}

// Sign bits of values 8 i to 8 i + 7, from the values as they came: arithmetic may lose that of a zero or a
// NaN.
template <class T, int kWords>
__device__ __forceinline__ uint32_t signs(const Chunk<T, kWords>& values, int i) {
  const auto word = [&values](int w) { return word_or_zero(values, w); };
  if constexpr (kPerWord<T> == 2) {
    const int w = 4 * i;
    return tile::code_signs(tile::gather_bytes<1>(word(w), word(w + 1), word(w + 2), word(w + 3)),
                            tile::gather_bytes<3>(word(w), word(w + 1), word(w + 2), word(w + 3)));
  } else {
    const int w = 8 * i;
    return tile::code_signs(tile::gather_bytes<3>(word(w), word(w + 2), word(w + 4), word(w + 6)),
                            tile::gather_bytes<3>(word(w + 1), word(w + 3), word(w + 5), word(w + 7)));
  }
}

// The codes of a chunk, a byte for two values. Of single values two lanes make a byte.
template <class T, int kWords, int kCount>
__device__ __forceinline__ void store_codes(uint8_t* to, const uint32_t (&codes)[kCount], bool inside) {
  constexpr int kValues = Chunk<T, kWords>::kValues;
  if constexpr (kValues == 1) {
    const uint32_t pair = codes[0] | __shfl_down_sync(0xffffffffu, codes[0], 1) << 4;
    if (inside && threadIdx.x % 2 == 0) *to = static_cast<uint8_t>(pair);
  } else if constexpr (kValues == kBlock) {
    if (inside) __stcg(reinterpret_cast<uint2*>(to), make_uint2(codes[0], codes[1]));
  } else {
    using Bytes = Word<kValues / 2>;
    if (inside) __stcg(reinterpret_cast<Bytes*>(to), static_cast<Bytes>(codes[0]));
  }
}

template <class T, int kWords, bool kFlat>
__global__ void __launch_bounds__(kThreads)
    quantize_along_cols(const __grid_constant__ QuantizeParams p, const __grid_constant__ PackedLayout layout,
                        const __grid_constant__ Tiling t) {
  using Values = Chunk<T, kWords>;
  const Place<kFlat, kThreads, kSteps<kWords>> at(t, p.cols / Values::kValues, p.rows);
  const int64_t col = at.lane * Values::kValues;
  const T* in = head_pointer<const T>(p, at.head) + at.line * p.x.stride_s + col;
  uint8_t* data = layout.code_bytes(at.head, at.line, col / 2);
  Values values[kSteps<kWords>];
#pragma unroll
  for (int k = 0; k < kSteps<kWords>; ++k)
    values[k] = at.inside(k) ? Values::load(in + at.offset(k, Values::kValues, p.x.stride_s)) : Values{};
#pragma unroll
  for (int k = 0; k < kSteps<kWords>; ++k) {
    const uint8_t scale = tile::block_scale_byte(divide_bits(amax_bits(values[k]), p.global_scale));
    float x[Values::kFloats];
    values[k].to_floats(x);
    divide(x, p.global_scale);
    tile::CodeWords<Values::kFloats> codes;
    tile::e2m1_codes(x, tile::e4m3_value(scale), codes);
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(codes) / sizeof(codes[0])); ++i)
      codes[i] |= signs(values[k], i);
    store_codes<T, kWords>(data + at.offset(k, Values::kValues, p.cols) / 2, codes, at.inside(k));
    if (at.inside(k) && at.lane % Values::kLanes == 0) *layout.scale<Values::kLanes>(at, k) = scale;
  }
}

// Word `word` of 16 rows: one or two columns, a block each, to line `line` of the tile and the next.
template <class Tile, class T, int kWords>
__device__ __forceinline__ void quantize_columns(const Chunk<T, kWords> (&rows)[kBlock], int word,
                                                 const float* global_scale, Tile& tile, int line, int group) {
  constexpr int kColumns = kPerWord<T> < Chunk<T, kWords>::kValues ? kPerWord<T> : Chunk<T, kWords>::kValues;
  constexpr int kHalf = tile::kCodesPerWord;
  float amax[kPerWord<T>];
  column_amax(rows, word, amax);
  uint32_t codes[kColumns][2];
  uint8_t scale[kColumns];
#pragma unroll
  for (int c = 0; c < kColumns; ++c)
    scale[c] = tile::block_scale_byte(divide_bits(float_bits(amax[c]), global_scale));
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const auto bits = [&](int r) { return rows[half * kHalf + r].words[word]; };
    float x[kPerWord<T>][kHalf];
#pragma unroll
    for (int r = 0; r < kHalf; ++r) {
      float of_row[kPerWord<T>];
      unpack<T>(bits(r), of_row);
#pragma unroll
      for (int c = 0; c < kPerWord<T>; ++c) x[c][r] = of_row[c];
    }
    const uint32_t low = tile::code_signs(tile::gather_bytes<1>(bits(0), bits(2), bits(4), bits(6)),
                                          tile::gather_bytes<1>(bits(1), bits(3), bits(5), bits(7)));
    const uint32_t high = tile::code_signs(tile::gather_bytes<3>(bits(0), bits(2), bits(4), bits(6)),
                                           tile::gather_bytes<3>(bits(1), bits(3), bits(5), bits(7)));
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      tile::CodeWords<kHalf> of_half;
      divide(x[c], global_scale);
      tile::e2m1_codes(x[c], tile::e4m3_value(scale[c]), of_half);
      codes[c][half] = of_half[0] | (c + 1 < kPerWord<T> ? low : high);
    }
  }
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    tile.codes_at(line + c, group) = make_uint2(codes[c][0], codes[c][1]);
    tile.scale_at(line + c, group) = scale[c];
  }
}

template <class T, int kWords>
__global__ void __launch_bounds__(kRowThreads, 4)
    quantize_along_rows(const __grid_constant__ QuantizeParams p, const __grid_constant__ PackedLayout layout,
                        const __grid_constant__ Tiling t, bool wide_blocks) {
  using Rows = RowTile<T, kWords>;
  using Values = typename Rows::Values;
  __shared__ typename Rows::Packed packed;
  const Rows at(p, t);
  const T* in = head_pointer<const T>(p, at.origin.head) + at.row() * p.x.stride_s + at.col();
  const int64_t rows = at.col() < p.cols ? p.rows - at.row() : 0;
  Values values[kBlock];
#pragma unroll
  for (int r = 0; r < kBlock; ++r) values[r] = r < rows ? Values::load(in + r * p.x.stride_s) : Values{};
#pragma unroll
  for (int word = 0; word < kWords; ++word)
    quantize_columns(values, word, p.global_scale, packed, at.line() + word * kPerWord<T>, at.group);
  __syncthreads();  // the tile is whole

  const auto store = [](const auto* here, auto* there) { *there = *here; };
  if (wide_blocks)
    for_each_code_unit<uint2, kRowThreads>(packed, layout, at.origin, store);
  else
    for_each_code_unit<uint8_t, kRowThreads>(packed, layout, at.origin, store);
  for_each_scale<kRowThreads>(packed, layout, at.origin, store);
}

template <class T, int kWords, bool kFlat>
cudaError_t launch_along_cols(const QuantizeParams& p, cudaStream_t stream) {
  const Tiling tiling = Tiling::along_cols(p, kFlat, Chunk<T, kWords>::kLanes, kThreads, kSteps<kWords>);
  return launch_tiles(quantize_along_cols<T, kWords, kFlat>, tiling, kThreads, stream, p, PackedLayout(p),
                      tiling);
}

template <class T, int kWords>
cudaError_t launch_along_rows(const QuantizeParams& p, cudaStream_t stream) {
  const Tiling tiling = RowTile<T, kWords>::tiling(p);
  const PackedLayout layout(p);
  return launch_tiles(quantize_along_rows<T, kWords>, tiling, kRowThreads, stream, p, layout, tiling,
                      has_wide_blocks(layout));
}

template <class T>
cudaError_t launch(const QuantizeParams& p, cudaStream_t stream) {
  const auto wide = [](const QuantizeParams& of, int values) {
    return has_wide_rows(of, values) && is_aligned(of.data, kBlockBytes);
  };
  constexpr int kHalf = Chunk<T, 4>::kValues;
  if (p.along_rows)
    return has_wide_rows(p, kHalf) ? launch_along_rows<T, 4>(p, stream) : launch_along_rows<T, 1>(p, stream);
  if (is_flat(p)) {
    const QuantizeParams flat = flattened(p);
    return wide(flat, 2 * kHalf) ? launch_along_cols<T, 8, true>(flat, stream)
                                 : launch_along_cols<T, 1, true>(flat, stream);
  }
  return wide(p, kHalf) ? launch_along_cols<T, 4, false>(p, stream)
                        : launch_along_cols<T, 1, false>(p, stream);
}

}  // namespace

cudaError_t quantize(const QuantizeParams& p, cudaStream_t stream) {
  if (is_empty(p)) return cudaSuccess;
  switch (p.dtype) {
    case DType::kBFloat16: return launch<__nv_bfloat16>(p, stream);
    case DType::kFloat16: return launch<__half>(p, stream);
    case DType::kFloat32: return launch<float>(p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace attn_qat::common
