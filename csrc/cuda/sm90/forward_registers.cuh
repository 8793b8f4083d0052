// What a consumer of the forward holds and computes in registers: output accumulators, row exponents and sums, the
// softmax of a tile and the quantiser of P. A thread holds whole blocks of P: 16 keys of a row.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/ptx/math.cuh"
#include "cuda/ptx/special_registers.cuh"
#include "cuda/sm90/forward_plan.cuh"
#include "cuda/tile/probability_quantizer.cuh"

namespace attn_qat::sm90 {

constexpr float kNegativeInfinity = -__builtin_inff();
// Of a row that has seen no key: finite, so that exp2(-inf - E) is 0.
constexpr float kNoExponent = -3.402823466e38f;

template <class C, class T, Recipe kRecipe, bool kTraining>
struct ForwardRegisters {
  static constexpr int kNTiles = C::kTileK / 8, kDTiles = C::kHeadDim / 8, kKeySteps = C::kTileK / 16;
  static constexpr bool kQuantizes = kRecipe != Recipe::kFp4Qk;
  static constexpr bool kHighPrecision = kTraining || !kQuantizes;  // P itself is multiplied
  static constexpr int kBlocks = kQuantizes ? C::kTileK / 64 : 1;   // of 16 keys, of a thread's row
  using Packed = uint32_t[kKeySteps][4];
  // Row sums of rounded p are one more tile of high_precision_out, or where that would spill a product of their own.
  static constexpr bool kSumsInOutput = kHighPrecision && (C::kHeadDim == 64 || !kQuantizes);

  float out[kQuantizes ? kDTiles : 1][4],
      high_precision_out[kHighPrecision ? kDTiles + (kSumsInOutput ? 1 : 0) : 1][4];
  float exponent[2], row_sum[2], own_rounded_sum[2];

  __device__ ForwardRegisters() {
    zero(high_precision_out);
    zero(out);
    exponent[0] = exponent[1] = kNoExponent;
    row_sum[0] = row_sum[1] = own_rounded_sum[0] = own_rounded_sum[1] = 0.0f;
  }

  // Row sum of p as the products see it, rounded: what O_hp is divided by, so that a row of one key gives V itself and
  // delta carries no bias. lse and O take row_sum, of p before rounding.
  __device__ float& rounded_sum(int r) {
    if constexpr (kSumsInOutput)
      return high_precision_out[kDTiles][2 * r];
    else
      return own_rounded_sum[r];
  }

  // Key of column 8 j + 2 (lane % 4) + e of S, but for what the lane adds.
  __host__ __device__ static constexpr int key_of(int j, int e) {
    return kQuantizes ? j / 8 * 64 + j % 8 * 2 + e : 8 * j + e;
  }
  __device__ static int first_key() { return ptx::laneid() % 4 * (kQuantizes ? 16 : 2); }

  // Row half r does not see keys from limit[r] on.
  __device__ void mask(float (&s)[kNTiles][4], const int (&limit)[2]) const {
    const int first = first_key(), end[2] = {limit[0] - first, limit[1] - first};
#pragma unroll
    for (int j = 0; j < kNTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (key_of(j, e % 2) >= end[e / 2]) s[j][e] = kNegativeInfinity;
  }

  // x[0] becomes the largest of the first kCount.
  template <int kCount, int kSize>
  __device__ static void top_of(float (&x)[kSize]) {
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) x[i] = fmaxf(x[i], x[i + kCount / 2]);
    if constexpr (kCount > 2) top_of<kCount / 2>(x);
  }

  // Largest t = scale s of this thread's blocks in each row.
  __device__ void block_maxima(const float (&s)[kNTiles][4], float scale_log2,
                               float (&block_max)[2][kBlocks]) const {
    constexpr int kTiles = kNTiles / kBlocks;
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        float top[kTiles];  // a tree: fmaxf in a row would wait for itself
#pragma unroll
        for (int j = 0; j < kTiles; ++j)
          top[j] = fmaxf(s[block * kTiles + j][2 * r], s[block * kTiles + j][2 * r + 1]);
        top_of<kTiles>(top);
        block_max[r][block] = __fmul_rn(top[0], scale_log2);
      }
  }

  // Takes a tile into the exponents; what was summed so far follows by an exact 2^n.
  __device__ void raise_exponents(const float (&block_max)[2][kBlocks]) {
    bool grew = false;
    float next[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = block_max[r][0];
#pragma unroll
      for (int block = 1; block < kBlocks; ++block) top = fmaxf(top, block_max[r][block]);
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
      next[r] = fmaxf(exponent[r], ceilf(top));
      grew |= next[r] != exponent[r];
    }
    if (kRecipe != Recipe::kCudnn && __any_sync(0xffffffffu, grew)) {  // cudnn: nothing is summed yet
#pragma unroll
      for (int r = 0; r < 2; ++r)
        rescale(r, next[r] == exponent[r] ? 1.0f : ptx::ex2_approx_ftz(exponent[r] - next[r]));
    }
    exponent[0] = next[0], exponent[1] = next[1];
  }

  __device__ void rescale(int r, float factor) {
#pragma unroll
    for (int i = 0; i < kDTiles; ++i)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if constexpr (kHighPrecision) high_precision_out[i][2 * r + e] *= factor;
        if constexpr (kQuantizes) out[i][2 * r + e] *= factor;
      }
    row_sum[r] *= factor, rounded_sum(r) *= factor;
  }

  // One block of s becomes p, packed as the left operands of p V^ and, quantised with a gain of 2^k left in, of P^ V^.
  template <int kBlock, class Boundary>
  __device__ void probabilities(float (&s)[kNTiles][4], float scale_log2,
                                const float (&block_max)[2][kBlocks], Packed& p, Packed& quantized,
                                Boundary boundary) {
    constexpr float kGain = kProbabilityGain<kRecipe>;
    constexpr int kTiles = kNTiles / kBlocks;
    tile::BlockScale scale[2];
    if constexpr (kQuantizes)
      for (int r = 0; r < 2; ++r)
        scale[r] = tile::block_scale(ptx::ex2_approx_ftz(block_max[r][kBlock] - exponent[r]), kGain);
#pragma unroll
    for (int j = kBlock * kTiles; j < (kBlock + 1) * kTiles; ++j) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float &p0 = s[j][2 * r], &p1 = s[j][2 * r + 1];
        p0 = ptx::ex2_approx_ftz(__fmul_rn(p0, scale_log2) - exponent[r]);
        p1 = ptx::ex2_approx_ftz(__fmul_rn(p1, scale_log2) - exponent[r]);
        row_sum[r] += p0;
        row_sum[r] += p1;
        if constexpr (kHighPrecision) p[j / 2][j % 2 * 2 + r] = tile::pack(p0, p1, T{});
        if constexpr (kQuantizes)
          quantized[j / 2][j % 2 * 2 + r] = tile::quantize_and_pack(
              p0, p1, scale[r].reciprocal, scale[r].scale * (kGain * tile::kCodeUnit), T{});
      }
      // Else the compiler would take up so much at once that registers spill.
      if (C::kHeadDim == 128 && kBlock == 0 && kBlocks > 1 && j % 2 == 1) boundary();
    }
  }

  __device__ void store(const ForwardParams& p, const ForwardPlace<C>& here, int first_row) {
    constexpr float kInverseGain = 1.0f / kProbabilityGain<kRecipe>;
    const int lane = ptx::laneid();
    float out_scale[2], high_precision_scale[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = row_sum[r] + __shfl_xor_sync(0xffffffffu, row_sum[r], 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      const bool empty = sum == 0.0f;
      out_scale[r] = empty ? 0.0f : kInverseGain / sum;
      high_precision_scale[r] = empty ? 0.0f : 1.0f / rounded_sum(r);
      const int row = first_row + threadIdx.x % kWarpgroup / 32 * 16 + lane / 4 + 8 * r;
      if (lane % 4 != 0 || row >= p.shape.seq_q) continue;
      const int64_t at = (here.b * p.shape.heads_q + here.h) * p.shape.seq_q + row;
      if (p.lse)
        p.lse[at] = empty ? kNegativeInfinity : (exponent[r] + log2f(sum)) * static_cast<float>(kLn2);
      if (p.row_exponent)
        p.row_exponent[at] = empty ? INT32_MIN : max(static_cast<int32_t>(exponent[r]), INT32_MIN + 1);
    }
    if constexpr (kTraining)
      store_rows<C::kHeadDim, T>(p.high_precision_out, here.b, here.h, first_row, p.shape.seq_q,
                                 high_precision_out, high_precision_scale);
    if constexpr (kQuantizes)
      store_rows<C::kHeadDim, T>(p.out, here.b, here.h, first_row, p.shape.seq_q, out, out_scale);
    else
      store_rows<C::kHeadDim, T>(p.out, here.b, here.h, first_row, p.shape.seq_q, high_precision_out,
                                 high_precision_scale);
  }
};

}  // namespace attn_qat::sm90
