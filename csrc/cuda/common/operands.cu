// Fake-quantises Q, K and V of an attention problem in one launch, into contiguous scratch for the matmul
// kernels. Q and K always in blocks along the head dimension, V by recipe. Thread blocks are handed out to Q,
// K and V in turn.
//
// Along the head dimension two neighbouring lanes hold a block, 8 values in 16 bytes each. Along keys one
// lane holds 8 columns of 16 rows. Every value fits BF16 and FP16 exactly.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "cuda/launch.h"
#include "cuda/tile/quantize.cuh"
#include "format/nvfp4.h"

namespace attn_qat::common {
namespace {

using nvfp4::kBlock;

constexpr int kThreads = 256, kValues = 8;  // values of a lane: one 16-byte access

struct Operand {
  View in;
  void* out;
  int64_t heads, rows;  // of [B, heads, rows, head_dim]
  int64_t padded_rows;  // of a head in `out`; those from `rows` on become zero
  int64_t lanes;        // work items: one lane each
  uint32_t blocks;      // thread blocks
  bool along_rows;
};

struct OperandArgs {
  Operand operands[3];  // Q, K, V; the unused last one has no blocks
  int chunks;           // head_dim / kValues
};

__device__ __forceinline__ float2 to_floats(__nv_bfloat162 x) { return __bfloat1622float2(x); }
__device__ __forceinline__ float2 to_floats(__half2 x) { return __half22float2(x); }
__device__ __forceinline__ __nv_bfloat162 from_floats(float a, float b, __nv_bfloat162) {
  return __floats2bfloat162_rn(a, b);
}
__device__ __forceinline__ __half2 from_floats(float a, float b, __half2) { return __floats2half2_rn(a, b); }

template <class Pair>
__device__ __forceinline__ void unpack(const uint4& word, float (&x)[kValues]) {
  const auto* pairs = reinterpret_cast<const Pair*>(&word);
#pragma unroll
  for (int i = 0; i < kValues / 2; ++i) {
    const float2 pair = to_floats(pairs[i]);
    x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
  }
}

template <class Pair>
__device__ __forceinline__ uint4 packed(const float (&x)[kValues]) {
  uint4 word;
  auto* pairs = reinterpret_cast<Pair*>(&word);
#pragma unroll
  for (int i = 0; i < kValues / 2; ++i) pairs[i] = from_floats(x[2 * i], x[2 * i + 1], Pair{});
  return word;
}

// Element of the operand where (head, row, chunk) starts.
template <class Element>
__device__ __forceinline__ const Element* source(const Operand& o, int64_t head, int64_t row, int chunk) {
  const int64_t b = head / o.heads, h = head - b * o.heads;
  return static_cast<const Element*>(o.in.data) + b * o.in.stride_b + h * o.in.stride_h +
         row * o.in.stride_s + chunk * kValues;
}

template <class InPair, class OutPair>
__device__ void quantize_along_head_dim(const Operand& o, int64_t lane, int chunks) {
  // Lanes of a block sit side by side and head_dim is whole blocks: either both run or neither.
  if (lane >= o.lanes) return;
  const int64_t padded_row = lane / chunks, head = padded_row / o.padded_rows;
  const int64_t row = padded_row - head * o.padded_rows;
  const int chunk = static_cast<int>(lane - padded_row * chunks);
  float x[kValues] = {};
  if (row < o.rows) unpack<InPair>(*reinterpret_cast<const uint4*>(source<uint16_t>(o, head, row, chunk)), x);
  uint32_t amax = 0;
#pragma unroll
  for (float value : x) amax = max(amax, nvfp4::magnitude_bits(value));
  amax = max(amax, __shfl_xor_sync(3u << (threadIdx.x % 32 / 2 * 2), amax, 1));
  tile::fake_quantize(x, tile::block_scale(amax));
  static_cast<uint4*>(o.out)[lane] = packed<OutPair>(x);
}

template <class Pair>
__device__ void quantize_along_rows(const Operand& o, int64_t lane, int chunks) {
  if (lane >= o.lanes) return;
  const int64_t group = lane / chunks, groups = (o.padded_rows + kBlock - 1) / kBlock, head = group / groups;
  const int chunk = static_cast<int>(lane - group * chunks);
  const int64_t first = (group - head * groups) * kBlock;
  const int rows = static_cast<int>(min(o.rows - first, int64_t{kBlock}));  // that exist; none in padding
  const int stored = static_cast<int>(min(o.padded_rows - first, int64_t{kBlock}));
  const auto* from = source<uint16_t>(o, head, first, chunk);
  uint4 words[kBlock];
#pragma unroll
  for (int r = 0; r < kBlock; ++r)
    words[r] = r < rows ? *reinterpret_cast<const uint4*>(from + r * o.in.stride_s) : uint4{};
  uint32_t amax[kValues] = {};
#pragma unroll
  for (int r = 0; r < kBlock; ++r) {
    float x[kValues];
    unpack<Pair>(words[r], x);
#pragma unroll
    for (int i = 0; i < kValues; ++i) amax[i] = max(amax[i], nvfp4::magnitude_bits(x[i]));
  }
  float scale[kValues];
#pragma unroll
  for (int i = 0; i < kValues; ++i) scale[i] = tile::block_scale(amax[i]);
  uint4* to = static_cast<uint4*>(o.out) + (head * o.padded_rows + first) * chunks + chunk;
#pragma unroll
  for (int r = 0; r < kBlock; ++r) {
    if (r >= stored) return;
    float x[kValues];
    unpack<Pair>(words[r], x);
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      float one[1] = {x[i]};
      tile::fake_quantize(one, scale[i]);
      x[i] = one[0];
    }
    to[r * chunks] = packed<Pair>(x);
  }
}

template <class Pair>
__global__ void __launch_bounds__(kThreads)
    quantize_operands_kernel(const __grid_constant__ OperandArgs args) {
  uint32_t block = blockIdx.x;
  int which = 0;
  while (block >= args.operands[which].blocks) block -= args.operands[which++].blocks;
  const Operand& o = args.operands[which];
  const int64_t lane = int64_t{block} * kThreads + threadIdx.x;
  if (which == 2 && o.along_rows)
    quantize_along_rows<Pair>(o, lane, args.chunks);
  else if (which == 2)
    quantize_along_head_dim<Pair, Pair>(o, lane, args.chunks);
  else
    quantize_along_head_dim<Pair, __nv_bfloat162>(o, lane, args.chunks);
}

Operand operand(const View& in, void* out, const AttentionShape& s, int64_t heads, int64_t rows,
                int64_t padded_rows, bool along_rows) {
  if (!out) return {};
  const int64_t lines = along_rows ? (padded_rows + kBlock - 1) / kBlock : padded_rows;
  const int64_t lanes = s.batch * heads * lines * (s.head_dim / kValues);
  return {in, out, heads, rows, padded_rows, lanes, static_cast<uint32_t>((lanes + kThreads - 1) / kThreads), along_rows};
}

}  // namespace

cudaError_t quantize_operands(const OperandParams& p, cudaStream_t stream) {
  const AttentionShape& s = p.shape;
  const OperandArgs args{{operand(p.q, p.q_hat, s, s.heads_q, s.seq_q, s.seq_q, false),
                          operand(p.k, p.k_hat, s, s.heads_kv, s.seq_k, p.padded_keys, false),
                          operand(p.v, p.v_hat, s, s.heads_kv, s.seq_k, p.padded_keys,
                                  p.recipe == Recipe::kFp4)},
                         static_cast<int>(s.head_dim / kValues)};
  const unsigned blocks = args.operands[0].blocks + args.operands[1].blocks + args.operands[2].blocks;
  if (blocks == 0) return cudaSuccess;
  if (p.dtype == DType::kFloat16)
    quantize_operands_kernel<__half2><<<blocks, kThreads, 0, stream>>>(args);
  else
    quantize_operands_kernel<__nv_bfloat162><<<blocks, kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace attn_qat::common
