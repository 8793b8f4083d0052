// delta = rowsum(high_precision_out * grad_out), and with it all that a backward kernel needs of a row.
// Sixteen lanes share a row, 16 bytes of each operand a step; every lane has kRows rows in flight.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "cuda/launch.h"

namespace attn_qat::common {
namespace {

constexpr int kThreads = 256, kLanes = 16, kRows = 4;

struct RowArgs {
  View high_precision_out, grad_out;
  const float* delta_in;
  const float* lse;
  const int32_t* row_exponent;
  float* delta_out;
  RowStatistics* statistics;
  RowGroupStatistics* groups;
  int32_t* counters;  // to be zeroed
  int64_t counter_count;
  int64_t heads, seq, padded_seq, rows;  // rows = batch * heads * padded_seq
  int head_dim;
};

// Where a row of the launch lies: rows from seq on are padding.
struct Row {
  int64_t head, s;
  __device__ Row(const RowArgs& args, int64_t row)
      : head(row / args.padded_seq), s(row - head * args.padded_seq) {}
};

__device__ __forceinline__ float dot(uint4 a, uint4 b, float sum, float) {
  const auto *x = reinterpret_cast<const float*>(&a), *y = reinterpret_cast<const float*>(&b);
#pragma unroll
  for (int i = 0; i < 4; ++i) sum = fmaf(x[i], y[i], sum);
  return sum;
}

__device__ __forceinline__ float dot(uint4 a, uint4 b, float sum, __nv_bfloat16) {
  const auto *x = reinterpret_cast<const __nv_bfloat162*>(&a),
             *y = reinterpret_cast<const __nv_bfloat162*>(&b);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 u = __bfloat1622float2(x[i]), v = __bfloat1622float2(y[i]);
    sum = fmaf(u.y, v.y, fmaf(u.x, v.x, sum));
  }
  return sum;
}

__device__ __forceinline__ float dot(uint4 a, uint4 b, float sum, __half) {
  const auto *x = reinterpret_cast<const __half2*>(&a), *y = reinterpret_cast<const __half2*>(&b);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 u = __half22float2(x[i]), v = __half22float2(y[i]);
    sum = fmaf(u.y, v.y, fmaf(u.x, v.x, sum));
  }
  return sum;
}

template <class T>
__device__ __forceinline__ const T* row_pointer(const View& view, int64_t b, int64_t h, int64_t s) {
  return static_cast<const T*>(view.data) + b * view.stride_b + h * view.stride_h + s * view.stride_s;
}

// In double: it is a handful of operations a row, and lse of large scores has few digits to spare.
// row: in tensors without padding.
__device__ RowStatistics statistics_of(const RowArgs& args, int64_t row, float delta) {
  const float lse = args.lse[row];
  if (lse == -__builtin_inff()) return {0.0f, 0.0f, 0.0f, 0.0f};
  const double lse2 = static_cast<double>(lse) * kLog2e;
  const int32_t saved = args.row_exponent ? args.row_exponent[row] : INT32_MAX;
  const bool use_saved = saved != INT32_MAX && saved > INT32_MIN + 1;  // the forward saturates to these two
  const double exponent = use_saved ? static_cast<double>(saved) : ceil(lse2);
  return {static_cast<float>(exponent), static_cast<float>(exp2(exponent - lse2)), delta, 0.0f};
}

// x as the sum of three BF16: its 24 digits cut in pieces of eight. Inf and NaN stand in the first.
__device__ uint4 in_three(float x) {
  uint32_t piece[3] = {};
  float rest = x;
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    piece[i] = __float_as_uint(rest) >> 16;
    rest -= __uint_as_float(piece[i] << 16);
  }
  if (!isfinite(x)) piece[0] = isnan(x) ? 0x7fc0u : piece[0], piece[1] = piece[2] = 0;
  return {piece[0] | piece[1] << 16, piece[2], 0, 0};
}

template <class T>
__global__ void __launch_bounds__(kThreads) row_kernel(const __grid_constant__ RowArgs args) {
  constexpr int kValues = 16 / sizeof(T), kRowsPerBlock = kThreads / kLanes * kRows;
  const int lane = threadIdx.x % kLanes;
  const int64_t first = int64_t{blockIdx.x} * kRowsPerBlock + threadIdx.x / kLanes;
  float sums[kRows] = {};
  if (!args.delta_in) {
    for (int col = lane * kValues; col < args.head_dim; col += kLanes * kValues) {
      uint4 out[kRows] = {}, grad[kRows] = {};
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int64_t row = first + r * (kThreads / kLanes);
        if (row >= args.rows) continue;
        const Row at(args, row);
        if (at.s >= args.seq) continue;
        const int64_t b = at.head / args.heads, h = at.head - b * args.heads;
        out[r] = *reinterpret_cast<const uint4*>(row_pointer<T>(args.high_precision_out, b, h, at.s) + col);
        grad[r] = *reinterpret_cast<const uint4*>(row_pointer<T>(args.grad_out, b, h, at.s) + col);
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) sums[r] = dot(out[r], grad[r], sums[r], T{});
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int step = kLanes / 2; step > 0; step /= 2) sums[r] += __shfl_xor_sync(0xffffffffu, sums[r], step);
  }
  // Lane r of a row's lanes finishes row r.
  float sum = 0.0f;
#pragma unroll
  for (int r = 0; r < kRows; ++r)
    if (lane == r) sum = sums[r];
  const int64_t row = first + lane * (kThreads / kLanes);
  if (row >= args.rows || lane >= kRows) return;
  if (row < args.counter_count) args.counters[row] = 0;
  const Row at(args, row);
  RowStatistics x{};
  if (at.s < args.seq) {
    const int64_t unpadded = at.head * args.seq + at.s;
    const float delta = args.delta_in ? args.delta_in[unpadded] : sum;
    if (args.delta_out) args.delta_out[unpadded] = delta;
    if (args.statistics || args.groups) x = statistics_of(args, unpadded, delta);
    if (args.statistics) args.statistics[unpadded] = x;
  }
  if (args.groups) {
    RowGroupStatistics& group = args.groups[row / RowGroupStatistics::kRows];
    const int i = row % RowGroupStatistics::kRows;
    group.exponent[i] = x.exponent, group.normaliser[i] = x.normaliser;
    reinterpret_cast<uint4&>(group.minus_delta[i]) = in_three(-x.delta);
  }
}

cudaError_t launch(const RowArgs& args, DType dtype, cudaStream_t stream) {
  if (args.rows == 0) return cudaSuccess;
  const int64_t rows_per_block = kThreads / kLanes * kRows;
  const auto blocks = static_cast<unsigned>((args.rows + rows_per_block - 1) / rows_per_block);
  switch (dtype) {
    case DType::kBFloat16: row_kernel<__nv_bfloat16><<<blocks, kThreads, 0, stream>>>(args); break;
    case DType::kFloat16: row_kernel<__half><<<blocks, kThreads, 0, stream>>>(args); break;
    case DType::kFloat32: row_kernel<float><<<blocks, kThreads, 0, stream>>>(args); break;
  }
  return cudaGetLastError();
}

}  // namespace

const char* why_not(const PreprocessParams&) { return nullptr; }

cudaError_t preprocess(const PreprocessParams& p, cudaStream_t stream) {
  RowArgs args{};
  args.high_precision_out = p.high_precision_out, args.grad_out = p.grad_out, args.delta_out = p.delta;
  args.heads = p.heads, args.seq = args.padded_seq = p.seq, args.rows = p.batch * p.heads * p.seq;
  args.head_dim = static_cast<int>(p.head_dim);
  return launch(args, p.dtype, stream);
}

namespace {

RowArgs statistics_args(const BackwardParams& p, int64_t padded_seq) {
  const AttentionShape& s = p.shape;
  RowArgs args{};
  args.high_precision_out = p.high_precision_out, args.grad_out = p.grad_out;
  args.delta_in = p.delta, args.lse = p.lse, args.row_exponent = p.row_exponent;
  args.heads = s.heads_q, args.seq = s.seq_q, args.padded_seq = padded_seq;
  args.rows = s.batch * s.heads_q * padded_seq;
  args.head_dim = static_cast<int>(s.head_dim);
  return args;
}

}  // namespace

cudaError_t row_statistics(const BackwardParams& p, RowStatistics* statistics, cudaStream_t stream) {
  RowArgs args = statistics_args(p, p.shape.seq_q);
  args.statistics = statistics;
  return launch(args, p.dtype, stream);
}

cudaError_t row_group_statistics(const BackwardParams& p, int64_t padded_rows, RowGroupStatistics* statistics,
                                 int32_t* counters, int64_t counter_count, cudaStream_t stream) {
  RowArgs args = statistics_args(p, padded_rows);
  args.groups = statistics, args.counters = counters, args.counter_count = counter_count;
  return launch(args, p.dtype, stream);
}

}  // namespace attn_qat::common
