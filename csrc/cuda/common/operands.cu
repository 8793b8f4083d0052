// Fake-quantises Q, K and V of an attention problem in one launch, into contiguous scratch for the matmul
// kernels. Q and K always in blocks along the head dimension, V by recipe. Thread blocks are handed out to Q,
// K and V in turn.
//
// A thread block takes rows of one head. Along the head dimension two neighbouring lanes hold a block, 8 values in 16
// bytes each. Along keys one lane holds 8 columns of 16 rows. Every value fits BF16 and FP16 exactly.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "cuda/launch.h"
#include "cuda/tile/quantize.cuh"
#include "format/nvfp4.h"

namespace attn_qat::common {
namespace {

using nvfp4::kBlock;

constexpr int kThreads = 128, kValues = 8;  // values of a lane: one 16-byte access
constexpr int kUnroll = 4;  // accesses of a lane that are in flight, where blocks lie in a row

struct Operand {
  View in;
  void* out;
  uint32_t heads, rows;     // of [B, heads, rows, head_dim]
  uint32_t padded_rows;     // of a head in `out`; those from `rows` on become zero
  uint32_t blocks_of_head;  // thread blocks
  uint32_t blocks;
  bool along_rows;
};

struct OperandArgs {
  Operand operands[3];  // Q, K, V; the unused last one has no blocks
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

// Rows of a head that a thread block takes.
template <int kChunks>
__host__ __device__ constexpr uint32_t rows_of_block(bool along_rows) {
  return along_rows ? kThreads / kChunks * kBlock : kThreads / kChunks * kUnroll;
}

// The head of thread block `block`: its elements, and where it starts in `out`.
struct Head {
  const uint16_t* in;
  int64_t out_row;
  uint32_t first_row;  // of the thread block

  __device__ Head(const Operand& o, uint32_t block, uint32_t rows_of_block) {
    const uint32_t head = block / o.blocks_of_head, b = head / o.heads, h = head - b * o.heads;
    in = static_cast<const uint16_t*>(o.in.data) + b * o.in.stride_b + h * o.in.stride_h;
    out_row = int64_t{head} * o.padded_rows;
    first_row = (block - head * o.blocks_of_head) * rows_of_block;
  }
};

template <int kChunks, class InPair, class OutPair>
__device__ void quantize_along_head_dim(const Operand& o, uint32_t block) {
  const Head head(o, block, rows_of_block<kChunks>(false));
  const uint32_t chunk = threadIdx.x % kChunks, first = head.first_row + threadIdx.x / kChunks;
  uint4 words[kUnroll];
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    const uint32_t row = first + i * (kThreads / kChunks);
    words[i] = row < o.rows ? *reinterpret_cast<const uint4*>(head.in + row * o.in.stride_s + chunk * kValues)
                            : uint4{};
  }
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    const uint32_t row = first + i * (kThreads / kChunks);
    float x[kValues];
    unpack<InPair>(words[i], x);
    uint32_t amax = 0;
#pragma unroll
    for (float value : x) amax = max(amax, nvfp4::magnitude_bits(value));
    amax = max(amax, __shfl_xor_sync(0xffffffffu, amax, 1));
    tile::fake_quantize(x, tile::block_scale(amax));
    if (row < o.padded_rows)
      static_cast<uint4*>(o.out)[(head.out_row + row) * kChunks + chunk] = packed<OutPair>(x);
  }
}

template <int kChunks, class Pair>
__device__ void quantize_along_rows(const Operand& o, uint32_t block) {
  const Head head(o, block, rows_of_block<kChunks>(true));
  const uint32_t chunk = threadIdx.x % kChunks, first = head.first_row + threadIdx.x / kChunks * kBlock;
  const uint16_t* from = head.in + first * o.in.stride_s + chunk * kValues;
  const auto word = [&](int r) {
    return first + r < o.rows ? *reinterpret_cast<const uint4*>(from + r * o.in.stride_s) : uint4{};
  };
  uint32_t amax[kValues] = {};
#pragma unroll
  for (int r = 0; r < kBlock; ++r) {
    float x[kValues];
    unpack<Pair>(word(r), x);
#pragma unroll
    for (int i = 0; i < kValues; ++i) amax[i] = max(amax[i], nvfp4::magnitude_bits(x[i]));
  }
  float scale[kValues];
#pragma unroll
  for (int i = 0; i < kValues; ++i) scale[i] = tile::block_scale(amax[i]);
  uint4* to = static_cast<uint4*>(o.out) + (head.out_row + first) * kChunks + chunk;
  // The second reading comes from the first-level cache: holding the rows would leave few thread blocks on a
  // multiprocessor.
#pragma unroll 4
  for (int r = 0; r < kBlock; ++r) {
    if (first + r >= o.padded_rows) return;
    float x[kValues];
    unpack<Pair>(word(r), x);
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      float one[1] = {x[i]};
      tile::fake_quantize(one, scale[i]);
      x[i] = one[0];
    }
    to[r * kChunks] = packed<Pair>(x);
  }
}

template <int kChunks, class Pair>
__global__ void __launch_bounds__(kThreads, 6)
    quantize_operands_kernel(const __grid_constant__ OperandArgs args) {
  uint32_t block = blockIdx.x;
  int which = 0;
  while (block >= args.operands[which].blocks) block -= args.operands[which++].blocks;
  const Operand& o = args.operands[which];
  if (which == 2 && o.along_rows)
    quantize_along_rows<kChunks, Pair>(o, block);
  else if (which == 2)
    quantize_along_head_dim<kChunks, Pair, Pair>(o, block);
  else
    quantize_along_head_dim<kChunks, Pair, __nv_bfloat162>(o, block);
}

template <int kChunks>
Operand operand(const View& in, void* out, int64_t batch, int64_t heads, int64_t rows, int64_t padded_rows,
                bool along_rows) {
  if (!out) return {};
  const uint32_t rows_each = rows_of_block<kChunks>(along_rows);
  const auto of_head = static_cast<uint32_t>((padded_rows + rows_each - 1) / rows_each);
  return {in,
          out,
          static_cast<uint32_t>(heads),
          static_cast<uint32_t>(rows),
          static_cast<uint32_t>(padded_rows),
          of_head,
          static_cast<uint32_t>(batch * heads * of_head),
          along_rows};
}

template <int kChunks, class Pair>
cudaError_t launch(const OperandParams& p, cudaStream_t stream) {
  const AttentionShape& s = p.shape;
  const OperandArgs args{{operand<kChunks>(p.q, p.q_hat, s.batch, s.heads_q, s.seq_q, s.seq_q, false),
                          operand<kChunks>(p.k, p.k_hat, s.batch, s.heads_kv, s.seq_k, p.padded_keys, false),
                          operand<kChunks>(p.v, p.v_hat, s.batch, s.heads_kv, s.seq_k, p.padded_keys,
                                           p.recipe == Recipe::kFp4)}};
  const unsigned blocks = args.operands[0].blocks + args.operands[1].blocks + args.operands[2].blocks;
  if (blocks == 0) return cudaSuccess;
  quantize_operands_kernel<kChunks, Pair><<<blocks, kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

template <class Pair>
cudaError_t launch_head_dim(const OperandParams& p, cudaStream_t stream) {
  if (p.shape.head_dim == 64) return launch<64 / kValues, Pair>(p, stream);
  if (p.shape.head_dim == 128) return launch<128 / kValues, Pair>(p, stream);
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t quantize_operands(const OperandParams& p, cudaStream_t stream) {
  return p.dtype == DType::kFloat16 ? launch_head_dim<__half2>(p, stream)
                                    : launch_head_dim<__nv_bfloat162>(p, stream);
}

}  // namespace attn_qat::common
