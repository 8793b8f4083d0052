// How thread blocks cover the (outer0, outer1, rows, cols) tensor of QuantizeParams.
//
// A thread block takes `lanes` side by side, a power of two and at most a warp, on threads / lanes lines;
// then as many lines further down, `steps` times in all, so that a thread has that many loads in flight.
// Thread blocks form one grid: across a head, then down, then from head to head (outer0 * outer1).
//
// A contiguous tensor whose blocks run along columns is flat: one line, on which thread blocks follow each
// other and no index is divided.
#pragma once
#include <cuda_runtime.h>

#include "format/nvfp4.h"
#include "params.h"

namespace attn_qat::common {

inline constexpr int64_t kMaxTiles = 0x7fffffff;  // of a grid's x dimension

__host__ __device__ constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Tiling {
  int64_t tiles;
  uint32_t across, down;  // tiles of a head; they divide in 32 bits, as a launch has at most kMaxTiles
  int32_t log2_lanes;

  // Of a head: `lanes` across and `lines` down.
  Tiling(int64_t lanes, int64_t lines, int64_t heads, int threads, int steps)
      : Tiling(log2_of_lanes(lanes), lanes, lines, heads, threads, steps) {}

  // The same with 2^log2_lanes_ lanes side by side.
  Tiling(int log2_lanes_, int64_t lanes, int64_t lines, int64_t heads, int threads, int steps)
      : log2_lanes(log2_lanes_) {
    const int64_t tiles_across = ceil_div(lanes, int64_t{1} << log2_lanes);
    const int64_t tiles_down = ceil_div(lines, int64_t{threads >> log2_lanes} * steps);
    tiles = tiles_across * tiles_down * heads;
    across = static_cast<uint32_t>(tiles_across), down = static_cast<uint32_t>(tiles_down);
  }

  // Of a flat tensor.
  Tiling(int64_t lanes, int threads, int steps)
      : tiles(ceil_div(lanes, int64_t{threads} * steps)), across(1), down(1), log2_lanes(0) {}

  // Of blocks along columns, each shared by `block_lanes` lanes.
  static Tiling along_cols(const QuantizeParams& p, bool flat, int block_lanes, int threads, int steps) {
    const int64_t lanes = ceil_div(p.cols, nvfp4::kBlock) * block_lanes;
    return flat ? Tiling(lanes, threads, steps) : Tiling(lanes, p.rows, p.outer0 * p.outer1, threads, steps);
  }

 private:
  static int log2_of_lanes(int64_t lanes) {
    int log2 = 0;
    while (log2 < 5 && int64_t{1} << log2 < lanes) ++log2;
    return log2;
  }
};

template <class... Params, class... Args>
cudaError_t launch_tiles(void (*kernel)(Params...), const Tiling& tiling, int threads, cudaStream_t stream,
                         const Args&... args) {
  if (tiling.tiles > kMaxTiles) return cudaErrorInvalidValue;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(tiling.tiles));
  config.blockDim = dim3(threads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

// Where a thread works: at a lane of a line, and in step k some lanes or lines further on.
template <bool kFlat, int kThreads, int kSteps>
struct Place {
  uint32_t head;
  int64_t line, lane;
  int step;  // lines, or of a flat tensor lanes
  int left;  // from here to the end of the tensor, in the same unit

  // Of a head that has `lanes` lanes and `lines` lines.
  __device__ Place(const Tiling& t, int64_t lanes, int64_t lines) {
    if constexpr (kFlat) {
      head = 0, line = 0, step = kThreads;
      lane = int64_t{blockIdx.x} * (kThreads * kSteps) + threadIdx.x;
      left = clamped(lanes - lane);
    } else {
      const uint32_t above = blockIdx.x / t.across, in_row = blockIdx.x - above * t.across;
      head = above / t.down, step = kThreads >> t.log2_lanes;
      line = int64_t{above - head * t.down} * step * kSteps + (threadIdx.x >> t.log2_lanes);
      lane = (int64_t{in_row} << t.log2_lanes) + (threadIdx.x & ((1u << t.log2_lanes) - 1u));
      left = lane < lanes ? clamped(lines - line) : 0;
    }
  }

  __device__ bool inside(int k) const { return k * step < left; }

  // From step 0 to step k, where neighbouring lanes and lines are that far apart.
  __device__ int64_t offset(int k, int64_t lane_pitch, int64_t line_pitch) const {
    return k * (kFlat ? kThreads * lane_pitch : step * line_pitch);
  }

 private:
  __device__ static int clamped(int64_t count) { return static_cast<int>(min(count, int64_t{0x7fffffff})); }
};

// First element of a head.
template <class T>
__device__ __forceinline__ T* head_pointer(const QuantizeParams& p, uint32_t head) {
  const uint32_t heads = static_cast<uint32_t>(p.outer1), b = head / heads, h = head - b * heads;
  return static_cast<T*>(p.x.data) + b * p.x.stride_b + h * p.x.stride_h;
}

inline bool is_empty(const QuantizeParams& p) { return !p.outer0 || !p.outer1 || !p.rows || !p.cols; }

// Contiguous, with whole blocks along columns. Strides of single entries do not matter.
inline bool is_flat(const QuantizeParams& p) {
  const auto follows = [](int64_t size, int64_t stride, int64_t inner) {
    return size == 1 || stride == inner;
  };
  return !p.along_rows && !p.tiled_scales && follows(p.rows, p.x.stride_s, p.cols) &&
         follows(p.outer1, p.x.stride_h, p.rows * p.cols) &&
         follows(p.outer0, p.x.stride_b, p.outer1 * p.rows * p.cols) &&
         (p.cols % nvfp4::kBlock == 0 || p.outer0 * p.outer1 * p.rows == 1);  // one row may have a tail
}

inline QuantizeParams flattened(QuantizeParams p) {
  p.cols *= p.outer0 * p.outer1 * p.rows;
  p.outer0 = p.outer1 = p.rows = 1;
  return p;
}

inline bool is_aligned(const void* data, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(data) % bytes == 0;
}

// Whether every row of x is whole chunks of `values` on multiples of 16 bytes.
inline bool has_wide_rows(const QuantizeParams& p, int values) {
  const auto multiple = [&p](int64_t size, int64_t stride) {
    return size <= 1 || stride * dtype_bytes(p.dtype) % 16 == 0;
  };
  return is_aligned(p.x.data, 16) && p.cols % values == 0 && multiple(p.outer0, p.x.stride_b) &&
         multiple(p.outer1, p.x.stride_h) && multiple(p.rows, p.x.stride_s);
}

}  // namespace attn_qat::common
