// Operand tiles in shared memory: rows of kHeadDim 16-bit elements, cut into 16-byte chunks that are
// XOR-swizzled so that the eight rows of an ldmatrix matrix never share a bank.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/ptx/smem.cuh"

namespace attn_qat::tile {

inline constexpr int kChunk = 8;  // 16-bit elements in 16 bytes

// Rows that one matrix reads are eight in a row.
struct NaturalRows {
  __device__ static int swizzle(int row) { return row & 7; }
};

// The forward reads rows 16 t + 2 j + e (t < 4, e < 2): bits 5, 4 and 0 tell them apart.
struct PermutedRows {
  __device__ static int swizzle(int row) { return (row & 1) | ((row >> 3) & 6); }
};

// Byte offset of a 16-byte chunk.
template <int kHeadDim, class Rows>
__device__ __forceinline__ uint32_t chunk_offset(int row, int chunk) {
  return static_cast<uint32_t>((row * (kHeadDim / kChunk) + (chunk ^ Rows::swizzle(row))) * 16);
}

// Copies tiles of kRows rows from global memory with cp.async, all threads together; missing rows become
// zero.
template <int kHeadDim, int kRows, int kThreads, class Rows, class T>
class RowLoader {
  static constexpr int kChunks = kHeadDim / kChunk, kRowsPerPass = kThreads / kChunks;
  static_assert(kThreads % kChunks == 0 && kRows % kRowsPerPass == 0, "each pass copies whole rows");

 public:
  __device__ RowLoader(const T* first, int64_t stride) : pass_bytes_(stride * kRowsPerPass * 2) {
    restart(first);
  }

  __device__ void restart(const T* first) {
    source_ =
        reinterpret_cast<const char*>(first + row() * (pass_bytes_ / (kRowsPerPass * 2)) + chunk() * kChunk);
  }

  // Starts the copy of the next kRows rows, of which `rows` exist.
  __device__ void load(ptx::SmemAddr tile, int rows) {
#pragma unroll
    for (int pass = 0; pass < kRows / kRowsPerPass; ++pass) {
      const int r = pass * kRowsPerPass + row();
      ptx::cp_async_16({tile.bits + chunk_offset<kHeadDim, Rows>(r, chunk())}, source_, r < rows);
      source_ += pass_bytes_;
    }
  }

 private:
  __device__ static int chunk() { return threadIdx.x % kChunks; }
  __device__ static int row() { return threadIdx.x / kChunks; }

  const char* source_;  // this thread's chunk of its next row
  int64_t pass_bytes_;
};

// Addresses that one lane gives to ldmatrix, for every 16 columns of a tile: the swizzle takes one of four
// values, the rest are constants that fold into the instruction. `shift` moves them to another tile.
template <int kHeadDim>
struct LaneAddresses {
  uint32_t column[4];

  // The lane's row (with its swizzle) and which of the two chunks in 16 columns it reads.
  __device__ LaneAddresses(ptx::SmemAddr tile, int row, int swizzle, int chunk) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      column[i] = tile.bits + static_cast<uint32_t>(row * kHeadDim * 2 + (2 * i ^ swizzle ^ chunk) * 16);
  }

  // Columns 16 d .. 16 d + 15, `rows` rows further on: a multiple of what the swizzle repeats after.
  __device__ ptx::SmemAddr at(int d, int rows = 0) const {
    return {column[d % 4] + static_cast<uint32_t>(d / 4 * 128 + rows * kHeadDim * 2)};
  }

  __device__ LaneAddresses shift(int bytes) const {
    LaneAddresses other = *this;
    other.move(bytes);
    return other;
  }

  __device__ void move(int bytes) {
#pragma unroll
    for (uint32_t& c : column) c += static_cast<uint32_t>(bytes);
  }
};

// Two floats as one packed pair of 16-bit elements, the first in the low half.
__device__ __forceinline__ uint32_t pack(float low, float high, __nv_bfloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}
__device__ __forceinline__ uint32_t pack(float low, float high, __half) {
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

}  // namespace attn_qat::tile
