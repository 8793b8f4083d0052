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
  int64_t heads, seq, rows;  // rows = batch * heads * seq
  int head_dim;
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
__device__ RowStatistics statistics_of(const RowArgs& args, int64_t row, float delta) {
  const float lse = args.lse[row];
  if (lse == -__builtin_inff()) return {0.0f, 0.0f, 0.0f, 0.0f};
  const double lse2 = static_cast<double>(lse) * 1.4426950408889634;
  const int32_t saved = args.row_exponent ? args.row_exponent[row] : INT32_MAX;
  const bool use_saved = saved != INT32_MAX && saved > INT32_MIN + 1;  // the forward saturates to these two
  const double exponent = use_saved ? static_cast<double>(saved) : ceil(lse2);
  return {static_cast<float>(exponent), static_cast<float>(exp2(exponent - lse2)), delta, 0.0f};
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
        const int64_t head = row / args.seq, s = row - head * args.seq, b = head / args.heads,
                      h = head - b * args.heads;
        out[r] = *reinterpret_cast<const uint4*>(row_pointer<T>(args.high_precision_out, b, h, s) + col);
        grad[r] = *reinterpret_cast<const uint4*>(row_pointer<T>(args.grad_out, b, h, s) + col);
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) sums[r] = dot(out[r], grad[r], sums[r], T{});
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int step = kLanes / 2; step > 0; step /= 2) sums[r] += __shfl_xor_sync(0xffffffffu, sums[r], step);
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int64_t row = first + r * (kThreads / kLanes);
    if (row >= args.rows || lane != 0) continue;
    if (args.delta_out) args.delta_out[row] = sums[r];
    if (args.statistics)
      args.statistics[row] = statistics_of(args, row, args.delta_in ? args.delta_in[row] : sums[r]);
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
  args.heads = p.heads, args.seq = p.seq, args.rows = p.batch * p.heads * p.seq;
  args.head_dim = static_cast<int>(p.head_dim);
  return launch(args, p.dtype, stream);
}

cudaError_t row_statistics(const BackwardParams& p, RowStatistics* statistics, cudaStream_t stream) {
  const AttentionShape& s = p.shape;
  RowArgs args{p.high_precision_out,
               p.grad_out,
               p.delta,
               p.lse,
               p.row_exponent,
               nullptr,
               statistics,
               s.heads_q,
               s.seq_q,
               s.batch * s.heads_q * s.seq_q,
               static_cast<int>(s.head_dim)};
  return launch(args, p.dtype, stream);
}

}  // namespace attn_qat::common
