// fake_quantize: every block of 16 values becomes code * scale (format/nvfp4.h), in one pass over memory.
//
// Along columns (axis -1)               Along rows (axis -2)
//   lane 0 | lane 1 | lane 0 | ...        lane 0 | lane 1 | ...      16 rows of V columns in each lane:
//   V values each; 16 / V lanes           row 0                      a block lies within one lane,
//   hold a block and exchange             ...                        rows are read side by side
//   its largest magnitude                 row 15
//
// V values are one wide load where addresses allow it, else V = 1. A block's missing tail counts as zeros.
// Thread blocks form one grid: tiles of the columns, then of the rows, then heads (outer0 * outer1).
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <type_traits>

#include "cuda/launch.h"
#include "cuda/tile/quantize.cuh"
#include "format/nvfp4.h"

namespace attn_qat::common {
namespace {

using nvfp4::kBlock;

constexpr int kThreads = 256;
constexpr int64_t kMaxTiles = 0x7fffffff;  // of a grid's x dimension

__device__ float to_float(float x) { return x; }
__device__ float to_float(__half x) { return __half2float(x); }
__device__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T>
__device__ T from_float(float x) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) return __float2bfloat16_rn(x);
  else if constexpr (std::is_same_v<T, __half>) return __float2half_rn(x);
  else return x;
}

// One memory access. __stcg stores as `=` does (L1 keeps no writes), but the compiler cannot split it.
template <int kBytes> struct WordOf;
template <> struct WordOf<2> { using type = uint16_t; };
template <> struct WordOf<4> { using type = uint32_t; };
template <> struct WordOf<8> { using type = uint2; };
template <> struct WordOf<16> { using type = uint4; };

template <class T, int V>
struct alignas(sizeof(T) * V) Pack {
  using Word = typename WordOf<sizeof(T) * V>::type;
  T values[V];

  __device__ static Pack load(const T* p) {
    Pack pack;
    reinterpret_cast<Word&>(pack) = *reinterpret_cast<const Word*>(p);
    return pack;
  }
  __device__ void store(T* p) const {
    __stcg(reinterpret_cast<Word*>(p), reinterpret_cast<const Word&>(*this));
  }
};

// Values a lane moves at once. Along rows it holds 16 packs, hence the narrower ones.
template <class T, bool kAlongRows>
constexpr int kWide = (kAlongRows ? 8 : 16) / sizeof(T);

// Threads of a block: x over the lanes of a row, y over rows (along rows: over groups of 16 rows).
struct Tiling {
  int threads_x, threads_y;
  int64_t tiles;
  uint32_t tiles_x, tiles_y;  // divisors of tiles, which why_not keeps below 2^31: kernels divide in 32 bits

  Tiling(const QuantizeParams& p, int values) {
    const int64_t blocks = (p.cols + kBlock - 1) / kBlock;
    const int64_t lanes = p.along_rows ? (p.cols + values - 1) / values : blocks * (kBlock / values);
    const int64_t rows = p.along_rows ? (p.rows + kBlock - 1) / kBlock : p.rows;
    threads_x = static_cast<int>(lanes < kThreads ? lanes : kThreads);
    threads_y = kThreads / threads_x;
    const int64_t across = (lanes + threads_x - 1) / threads_x, down = (rows + threads_y - 1) / threads_y;
    tiles = across * down * p.outer0 * p.outer1;
    tiles_x = static_cast<uint32_t>(across);
    tiles_y = static_cast<uint32_t>(down);
  }
};

// Where a thread works: its head's first element, and its place among the lanes and rows of that head.
template <class T>
struct Place {
  const T* in;
  T* out;
  int64_t lane, row;

  __device__ Place(const QuantizeParams& p, const Tiling& t) {
    const uint32_t head_tile = blockIdx.x / t.tiles_x;
    const uint32_t head = head_tile / t.tiles_y;
    lane = int64_t{blockIdx.x - head_tile * t.tiles_x} * t.threads_x + threadIdx.x;
    row = int64_t{head_tile - head * t.tiles_y} * t.threads_y + threadIdx.y;
    const uint32_t heads = static_cast<uint32_t>(p.outer1);
    const uint32_t b = head / heads, h = head - b * heads;
    in = static_cast<const T*>(p.x.data) + b * p.x.stride_b + h * p.x.stride_h;
    out = static_cast<T*>(p.out) + head * p.rows * p.cols;
  }
};

// Values of one block, or a lane's part of it, through the global scale g: x / g is what is quantised.
template <int N>
__device__ __forceinline__ void divide(float (&x)[N], const float* global_scale) {
  if (!global_scale) return;
  const float g = *global_scale;
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = __fdiv_rn(x[i], g);
}

template <int N>
__device__ __forceinline__ void multiply(float (&x)[N], const float* global_scale) {
  if (!global_scale) return;
  const float g = *global_scale;
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = __fmul_rn(x[i], g);
}

template <int N>
__device__ __forceinline__ uint32_t amax_bits(const float (&x)[N]) {
  uint32_t amax = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) amax = max(amax, nvfp4::magnitude_bits(x[i]));
  return amax;
}

template <class T, int V>
__global__ void __launch_bounds__(kThreads) fake_quantize_along_cols(const QuantizeParams p, const Tiling t) {
  constexpr int kLanes = kBlock / V;
  const Place<T> at(p, t);
  if (at.row >= p.rows) return;  // whole blocks leave together: their lanes share a row
  const int64_t col = at.lane * V;
  const bool inside = col < p.cols;
  float x[V] = {};
  if (inside) {
    const auto in = Pack<T, V>::load(at.in + at.row * p.x.stride_s + col);
#pragma unroll
    for (int i = 0; i < V; ++i) x[i] = to_float(in.values[i]);
    divide(x, p.global_scale);
  }
  uint32_t amax = amax_bits(x);
  const unsigned lane = (threadIdx.y * blockDim.x + threadIdx.x) % 32;
  const unsigned block_lanes = ((1u << kLanes) - 1u) << (lane - lane % kLanes);
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) amax = max(amax, __shfl_xor_sync(block_lanes, amax, step));
  if (!inside) return;

  tile::fake_quantize(x, tile::block_scale(amax));
  multiply(x, p.global_scale);
  Pack<T, V> result;
#pragma unroll
  for (int i = 0; i < V; ++i) result.values[i] = from_float<T>(x[i]);
  result.store(at.out + at.row * p.cols + col);
}

template <class T, int V>
__global__ void __launch_bounds__(kThreads) fake_quantize_along_rows(const QuantizeParams p, const Tiling t) {
  const Place<T> at(p, t);
  const int64_t col = at.lane * V, first_row = at.row * kBlock;
  if (col >= p.cols || first_row >= p.rows) return;
  const int rows = static_cast<int>(min(p.rows - first_row, static_cast<int64_t>(kBlock)));

  Pack<T, V> packs[kBlock];
#pragma unroll
  for (int r = 0; r < kBlock; ++r) {
    packs[r] = {};
    if (r < rows) packs[r] = Pack<T, V>::load(at.in + (first_row + r) * p.x.stride_s + col);
  }
#pragma unroll
  for (int i = 0; i < V; ++i) {
    float x[kBlock];
#pragma unroll
    for (int r = 0; r < kBlock; ++r) x[r] = to_float(packs[r].values[i]);
    divide(x, p.global_scale);
    tile::fake_quantize(x, tile::block_scale(amax_bits(x)));
    multiply(x, p.global_scale);
#pragma unroll
    for (int r = 0; r < kBlock; ++r) packs[r].values[i] = from_float<T>(x[r]);
  }
#pragma unroll
  for (int r = 0; r < kBlock; ++r) {
    if (r < rows) packs[r].store(at.out + (first_row + r) * p.cols + col);
  }
}

// Whether every row of x and out starts on a multiple of `bytes`. Strides of single entries do not matter.
bool allows_wide(const QuantizeParams& p, int values, int64_t bytes) {
  const auto aligned = [bytes](const void* data) { return reinterpret_cast<uintptr_t>(data) % bytes == 0; };
  const auto multiple = [values](int64_t size, int64_t stride) { return size <= 1 || stride % values == 0; };
  return aligned(p.x.data) && aligned(p.out) && p.cols % values == 0 && multiple(p.outer0, p.x.stride_b) &&
         multiple(p.outer1, p.x.stride_h) && multiple(p.rows, p.x.stride_s);
}

template <class T, int V, bool kAlongRows>
cudaError_t launch(const QuantizeParams& p, cudaStream_t stream) {
  const Tiling tiling(p, V);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(tiling.tiles));
  config.blockDim = dim3(tiling.threads_x, tiling.threads_y);
  config.stream = stream;
  if constexpr (kAlongRows) {
    return cudaLaunchKernelEx(&config, fake_quantize_along_rows<T, V>, p, tiling);
  } else {
    return cudaLaunchKernelEx(&config, fake_quantize_along_cols<T, V>, p, tiling);
  }
}

template <class T, bool kAlongRows>
cudaError_t launch_widest(const QuantizeParams& p, cudaStream_t stream) {
  constexpr int kValues = kWide<T, kAlongRows>;
  if (allows_wide(p, kValues, kValues * sizeof(T))) return launch<T, kValues, kAlongRows>(p, stream);
  return launch<T, 1, kAlongRows>(p, stream);
}

template <class T>
cudaError_t launch_axis(const QuantizeParams& p, cudaStream_t stream) {
  return p.along_rows ? launch_widest<T, true>(p, stream) : launch_widest<T, false>(p, stream);
}

bool is_empty(const QuantizeParams& p) { return !p.outer0 || !p.outer1 || !p.rows || !p.cols; }

}  // namespace

const char* why_not(const QuantizeParams& p) {
  if (is_empty(p)) return nullptr;
  return Tiling(p, 1).tiles > kMaxTiles ? "takes at most 2^31 - 1 tiles of 256 values" : nullptr;
}

cudaError_t fake_quantize(const QuantizeParams& p, cudaStream_t stream) {
  if (is_empty(p)) return cudaSuccess;
  if (why_not(p)) return cudaErrorInvalidValue;
  switch (p.dtype) {
    case DType::kBFloat16: return launch_axis<__nv_bfloat16>(p, stream);
    case DType::kFloat16: return launch_axis<__half>(p, stream);
    case DType::kFloat32: return launch_axis<float>(p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace attn_qat::common
