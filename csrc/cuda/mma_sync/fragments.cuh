// Pieces that the backward kernels share: fragments, pointers, zeroing.
#pragma once
#include "cuda/mma_sync/config.cuh"
#include "cuda/mma_sync/kernels.h"
#include "cuda/ptx/mma.cuh"
#include "cuda/tile/layout.cuh"

namespace attn_qat::mma_sync {

using Quantized = __nv_bfloat16;  // Q^ and K^ are exact in BF16 whatever the input dtype

template <int kTiles>
__device__ __forceinline__ void zero(float (&x)[kTiles][4]) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) x[i][0] = x[i][1] = x[i][2] = x[i][3] = 0.0f;
}

template <class T>
__device__ __forceinline__ const T* head_pointer(const View& view, int64_t b, int64_t h) {
  return static_cast<const T*>(view.data) + b * view.stride_b + h * view.stride_h;
}

// How a lane addresses a tile of natural rows for
//   A fragments: 16 rows, 16 columns; B fragments of X in Y X: 16 rows summed over, 16 columns, transposed;
//   B fragments of X in Y X^T: 16 rows as columns, summed over 16 columns.
template <int kHeadDim>
__device__ __forceinline__ tile::LaneAddresses<kHeadDim> rows_then_columns(ptx::SmemAddr t,
                                                                           int lane = threadIdx.x % 32) {
  return {t, lane % 16, lane % 8, lane / 16};
}
template <int kHeadDim>
__device__ __forceinline__ tile::LaneAddresses<kHeadDim> columns_then_rows(ptx::SmemAddr t,
                                                                           int lane = threadIdx.x % 32) {
  return {t, lane / 16 * 8 + lane % 8, lane % 8, lane / 8 % 2};
}

// acc += A X for the A fragments of 16 rows by 16 kSteps, X the rows of a tile from `row` on.
template <int kHeadDim, int kSteps, class T>
__device__ __forceinline__ void multiply_rows(float (&acc)[kHeadDim / 8][4], const uint32_t (&a)[kSteps][4],
                                              const tile::LaneAddresses<kHeadDim>& x, int row) {
#pragma unroll
  for (int s = 0; s < kSteps; ++s)
#pragma unroll
    for (int d = 0; d < kHeadDim / 16; ++d) {
      uint32_t b[4];
      ptx::ldmatrix_x4_trans(b, x.at(d, row + 16 * s));
      ptx::mma_m16n8k16(acc[2 * d], a[s], b[0], b[1], T{});
      ptx::mma_m16n8k16(acc[2 * d + 1], a[s], b[2], b[3], T{});
    }
}

// Stores 16 accumulator rows times `scale`, those below `valid_rows`.
template <int kHeadDim, class T>
__device__ __forceinline__ void store_rows(const View& view, int64_t b, int64_t h, int64_t first_row,
                                           int64_t valid_rows, const float (&acc)[kHeadDim / 8][4],
                                           float scale) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int64_t row = first_row + lane / 4 + 8 * r;
    if (row >= valid_rows) continue;
    T* to = static_cast<T*>(view.data) + b * view.stride_b + h * view.stride_h + row * view.stride_s +
            lane % 4 * 2;
#pragma unroll
    for (int d = 0; d < kHeadDim / 8; ++d)
      *reinterpret_cast<uint32_t*>(to + 8 * d) =
          tile::pack(acc[d][2 * r] * scale, acc[d][2 * r + 1] * scale, T{});
  }
}

// Packs C fragments of 16 rows by 16 kSteps columns as A fragments.
template <int kSteps, class T>
__device__ __forceinline__ void pack_a(const float (&c)[2 * kSteps][4], uint32_t (&a)[kSteps][4]) {
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    a[s][0] = tile::pack(c[2 * s][0], c[2 * s][1], T{});
    a[s][1] = tile::pack(c[2 * s][2], c[2 * s][3], T{});
    a[s][2] = tile::pack(c[2 * s + 1][0], c[2 * s + 1][1], T{});
    a[s][3] = tile::pack(c[2 * s + 1][2], c[2 * s + 1][3], T{});
  }
}

// A row or key count relative to a tile, as an int that comparisons against tile indices can use.
__device__ __forceinline__ int tile_limit(int64_t count) {
  constexpr int64_t kFar = 1 << 20;
  return static_cast<int>(min(max(count, -kFar), kFar));
}

}  // namespace attn_qat::mma_sync
