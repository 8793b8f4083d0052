// What a consumer of the fused backward holds and computes in registers: softmax, dS, the quantiser of P, and how dS and dQ are
// laid down in shared memory. A block of P is the 16 keys of a warp for one query: a column, two values in each of
// eight lanes. A butterfly over the lanes halves the columns at each step; the lane that ends with a column computes its
// scale once and hands it to the others through a scratch of its warp.
#pragma once
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/special_registers.cuh"
#include "cuda/sm90/backward_plan.cuh"
#include "cuda/tile/probability_quantizer.cuh"

namespace attn_qat::sm90 {

template <class C, class T, Recipe kRecipe>
struct BackwardRegisters {
  static constexpr int kNTiles = C::kTileQ / 8, kDTiles = C::kHeadDim / 8, kQuerySteps = C::kTileQ / 16;
  using Scores = float[kNTiles][4];
  using Packed = uint32_t[kQuerySteps][4];
  float dk[kDTiles][4], dv[kDTiles][4];

  __device__ BackwardRegisters() { zero(dk), zero(dv); }

  // Queries of the tile before first_query[r] do not see key half r.
  __device__ static void mask(Scores& s, const int (&first_query)[2]) {
    const int column = ptx::laneid() % 4 * 2, first[2] = {first_query[0] - column, first_query[1] - column};
#pragma unroll
    for (int j = 0; j < kNTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (8 * j + e % 2 < first[e / 2]) s[j][e] = -__builtin_inff();
  }

  // Of eight columns this thread's two.
  __device__ static float2 own_columns(const float (&columns)[8]) {
    return reinterpret_cast<const float2*>(columns)[ptx::laneid() % 4];
  }

  // Statistics of this thread's columns, 8 j + 2 (lane % 4) + 0 and 1, in registers ahead of their use: shared memory
  // is slow to answer while the tensor cores read it.
  struct Exponents {
    float2 of[kNTiles];
    __device__ void load(const RowGroupStatistics* statistics) {
#pragma unroll
      for (int j = 0; j < kNTiles; ++j) of[j] = own_columns(statistics[j].exponent);
    }
  };
  // s becomes p = exp2(t - E).
  __device__ static void probabilities(const Exponents& exponents, float scale_log2, Scores& s) {
#pragma unroll
    for (int j = 0; j < kNTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        s[j][e] = ptx::ex2_approx_ftz(__fmul_rn(s[j][e], scale_log2) -
                                      (e % 2 ? exponents.of[j].y : exponents.of[j].x));
  }

  // In columns 8 kFrom .. 8 kTo - 1 p becomes P, and dS = P (dP - delta) is packed as the left operand of dK.
  template <int kFrom, int kTo>
  __device__ static void grad_scores(const RowGroupStatistics* statistics, Scores& s, const Scores& dp,
                                     Packed& packed) {
#pragma unroll
    for (int j = kFrom; j < kTo; ++j) {
      const float2 n = own_columns(statistics[j].normaliser);
      float ds[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[j][e] *= e % 2 ? n.y : n.x;
        ds[e] = s[j][e] * dp[j][e];
      }
      packed[j / 2][j % 2 * 2] = tile::pack(ds[0], ds[1], Quantized{});
      packed[j / 2][j % 2 * 2 + 1] = tile::pack(ds[2], ds[3], Quantized{});
    }
  }

  // The 16 keys of this warp become columns 16 warp .. 16 warp + 15 of dS, which is this consumer's panel.
  __device__ static void store_grad_scores(ptx::SmemAddr panel, const Packed& packed) {
    const int lane = ptx::laneid(), warp = threadIdx.x % kWarpgroup / 32, row = lane / 16 * 8 + lane % 8;
    const uint32_t at = panel.bits + row * kRowBytes + ((2 * warp + lane / 8 % 2) ^ (row % 8)) * 16;
#pragma unroll
    for (int step = 0; step < kQuerySteps; ++step)
      ptx::stmatrix_x4_trans({at + step * 16 * kRowBytes}, packed[step]);
  }

  // Lanes that differ in kBit share 2 kWidth maxima; afterwards each holds kWidth of them for both.
  template <int kWidth, int kBit, int kCount>
  __device__ static void halve(float (&top)[kCount]) {
    const bool upper = ptx::laneid() & kBit;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const float low = top[i], high = top[i + kWidth], send = upper ? low : high, keep = upper ? high : low;
      top[i] = fmaxf(keep, __shfl_xor_sync(0xffffffffu, send, kBit));
    }
  }

  static constexpr bool kQuantizes = kRecipe != Recipe::kFp4Qk;
  static constexpr int kColumns = 2 * kNTiles;
  using Maxima = float[kColumns];
  // What P^ is multiplied by in dV. Where its products are rounded anyhow (E4M3 times n), a constant costs nothing here.
  static constexpr float kLeftInDv =
      kRecipe == Recipe::kFp4 && kDvGain<T> == 1.0f ? tile::kSaturation / tile::kCodeUnit : kDvGain<T>;

  // Of each column, over this thread's two keys. Recipe fp4 quantises p itself, cudnn P.
  __device__ static void maxima(const Scores& s, Maxima& top) {
#pragma unroll
    for (int j = 0; j < kNTiles; ++j) {
      top[2 * j] = fmaxf(s[j][0], s[j][2]);
      top[2 * j + 1] = fmaxf(s[j][1], s[j][3]);
    }
  }

  // 1 / scale, of P, for the columns that the halving has left to this lane, for its warp: of the pairs of columns
  // (8 j + 2 (lane % 4), + 1) those of kOwned / 2 consecutive j.
  __device__ static void share_reciprocals(const RowGroupStatistics* statistics, const Maxima& top,
                                           float* scratch) {
    constexpr int kOwned = kColumns / 8;
    const int lane = ptx::laneid();
    const int first = lane / 16 * (kNTiles / 2) + lane / 8 % 2 * (kNTiles / 4) + lane / 4 % 2 * (kNTiles / 8);
    __syncwarp();  // the reciprocals of the previous tile have been read
#pragma unroll
    for (int i = 0; i < kOwned; i += 2) {
      const int j = first + i / 2;
      const float2 n = own_columns(statistics[j].normaliser);
      reinterpret_cast<float2*>(scratch)[4 * j + lane % 4] = {reciprocal(top[i], n.x),
                                                              reciprocal(top[i + 1], n.y)};
    }
    __syncwarp();
  }
  __device__ static float reciprocal(float top, float n) {
    constexpr bool kOfP = kRecipe == Recipe::kCudnn;
    const float scale = tile::block_scale(kOfP ? top * n : top, kProbabilityGain<kRecipe>).scale;
    return ptx::rcp_approx_ftz(scale * tile::kSaturation * (kOfP ? 1.0f : n));
  }

  // P becomes the left operand of dV, quantised by recipe.
  __device__ static void probability_operand(const float* scratch, Scores& s, Packed& packed) {
#pragma unroll
    for (int j = 0; j < kNTiles; ++j) {
      if constexpr (kQuantizes) {
        constexpr float kFactor = kLeftInDv * tile::kCodeUnit / tile::kSaturation;
        const float2 r = reinterpret_cast<const float2*>(scratch)[4 * j + ptx::laneid() % 4];
        tile::quantize_pair_in_units(s[j][0], s[j][2], r.x, ptx::rcp_approx_ftz(r.x) * kFactor);
        tile::quantize_pair_in_units(s[j][1], s[j][3], r.y, ptx::rcp_approx_ftz(r.y) * kFactor);
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[j][e] *= kLeftInDv;
      }
#pragma unroll
      for (int r = 0; r < 2; ++r)
        packed[j / 2][j % 2 * 2 + r] = tile::pack(s[j][2 * r], s[j][2 * r + 1], T{});
    }
  }

  __device__ static void store_dq(float* half, const float (&dq)[8][4]) {
    auto* to = reinterpret_cast<float4*>(half) + threadIdx.x % kWarpgroup;
#pragma unroll
    for (int j = 0; j < 8; ++j) to[j * kWarpgroup] = {dq[j][0], dq[j][1], dq[j][2], dq[j][3]};
  }
};

}  // namespace attn_qat::sm90
