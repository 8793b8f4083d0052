// Operand tiles in shared memory, as boxes land there and wgmma reads them: panels of 64 columns, each of kRows rows
// of 128 bytes whose 16-byte chunks are XOR-swizzled with the row; and the products of such tiles.
#pragma once
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/config.cuh"
#include "cuda/sm90/tensor_map.h"
#include "cuda/tile/layout.cuh"

namespace attn_qat::sm90 {

using Quantized = __nv_bfloat16;  // Q^ and K^ are exact in BF16 whatever the input dtype

inline constexpr uint32_t kRowBytes = 128;  // of a panel

__host__ __device__ constexpr uint32_t panel_bytes(int rows) { return rows * kRowBytes; }

// Where columns 16 step .. 16 step + 15 (K-major) or rows 16 step .. 16 step + 15 (MN-major) of a tile start.
__host__ __device__ constexpr uint32_t column_step(int rows, int step) {
  return step / 4 * panel_bytes(rows) + step % 4 * 32;
}
__host__ __device__ constexpr uint32_t row_step(int step) { return step * 16 * kRowBytes; }

// Tile of kRows rows, operand of products that sum over its columns / over its rows.
__device__ __forceinline__ uint64_t columns_operand(const void* tile, int first_row = 0) {
  return ptx::smem_descriptor(ptx::smem_addr(tile).bits + first_row * kRowBytes);
}
template <int kRows>
__device__ __forceinline__ uint64_t rows_operand(const void* tile) {
  return ptx::smem_descriptor(ptx::smem_addr(tile).bits, panel_bytes(kRows));
}

template <int kTiles>
__device__ __forceinline__ void zero(float (&x)[kTiles][4]) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) x[i][0] = x[i][1] = x[i][2] = x[i][3] = 0.0f;
}

// d = A B^T, or d += it: kColumns columns of an A tile of kRowsA rows and a B tile of kRowsB.
template <int kColumns, int kRowsA, int kRowsB, bool kAdd = false, int kTiles, class T>
__device__ __forceinline__ void multiply_transposed(float (&d)[kTiles][4], uint64_t a, uint64_t b, T) {
#pragma unroll
  for (int step = 0; step < kColumns / 16; ++step)
    ptx::wgmma<0>(d, ptx::advance(a, column_step(kRowsA, step)), ptx::advance(b, column_step(kRowsB, step)),
                  kAdd || step > 0, T{});
}

// d += A B with A in registers: all of it, or columns 16 kFrom .. 16 kTo - 1 of A.
template <int kFrom, int kTo, int kSteps, int kTiles, class T>
__device__ __forceinline__ void multiply_add(float (&d)[kTiles][4], const uint32_t (&a)[kSteps][4],
                                             uint64_t b, T) {
#pragma unroll
  for (int step = kFrom; step < kTo; ++step)
    ptx::wgmma<1>(d, a[step], ptx::advance(b, row_step(step)), true, T{});
}
template <int kSteps, int kTiles, class T>
__device__ __forceinline__ void multiply_add(float (&d)[kTiles][4], const uint32_t (&a)[kSteps][4],
                                             uint64_t b, T) {
  multiply_add<0, kSteps>(d, a, b, T{});
}

// d = A B: A a tile of kRowsA rows and 16 kSteps columns in shared memory.
template <int kSteps, int kRowsA, int kTiles, class T>
__device__ __forceinline__ void multiply(float (&d)[kTiles][4], uint64_t a, uint64_t b, T) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
    ptx::wgmma<1>(d, ptx::advance(a, column_step(kRowsA, step)), ptx::advance(b, row_step(step)), step > 0,
                  T{});
}

// Stores an accumulator's rows times `scale`, those below `rows`, to global memory.
template <int kHeadDim, class T, int kTiles>
__device__ __forceinline__ void store_rows(const View& view, int64_t b, int64_t h, int64_t first_row,
                                           int64_t rows, const float (&acc)[kTiles][4],
                                           const float (&scale)[2]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % kWarpgroup / 32;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int64_t row = first_row + 16 * warp + lane / 4 + 8 * r;
    if (row >= rows) continue;
    T* to = static_cast<T*>(view.data) + b * view.stride_b + h * view.stride_h + row * view.stride_s +
            lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < kHeadDim / 8; ++j)
      *reinterpret_cast<uint32_t*>(to + 8 * j) =
          tile::pack(acc[j][2 * r] * scale[r], acc[j][2 * r + 1] * scale[r], T{});
  }
}

}  // namespace attn_qat::sm90
