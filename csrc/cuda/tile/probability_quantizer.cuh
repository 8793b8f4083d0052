// The quantiser of P in registers: format/nvfp4.h in a form that costs few instructions.
//
// Blocks of P hold values >= 0 whose scale is known before them. y = p * (1 / s) may be two last places off
// the exact quotient, no more than ex2.approx is off in p; forward and backward take the same y and so the
// same code. Tensors, where bits count, go through tile/quantize.cuh.
#pragma once
#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/ptx/math.cuh"
#include "cuda/tile/quantize.cuh"

namespace attn_qat::tile {

// What the arithmetic leaves in a factor and takes in a reciprocal; 1 where the hardware converts.
#if ATTN_QAT_HAS_E2M1
inline constexpr float kCodeUnit = 1.0f, kSaturation = 1.0f;
#else
inline constexpr float kCodeUnit = 0x1p24f, kSaturation = kE2m1Saturation;
#endif

// A block's scale s (times any power of two) and 1 / (kSaturation s) within one last place.
struct BlockScale {
  float scale, reciprocal;
};

// Scale of a block from its largest value (not negative). The values carry no gain, their codes do:
// scale = e4m3(max(largest * gain / 6, 2^-9)) / gain, with gain a power of two.
__device__ __forceinline__ BlockScale block_scale(float largest, float gain) {
  BlockScale s;
  s.scale = block_scale_of_magnitude(largest * gain) * (1.0f / gain);
  s.reciprocal = ptx::rcp_approx_ftz(s.scale * kSaturation);
  return s;
}

// p0, p1 (not negative) become code * factor / kCodeUnit, where factor is kCodeUnit times the block's scale times
// whatever the caller folds in.
__device__ __forceinline__ void quantize_pair_in_units(float& p0, float& p1, float reciprocal, float factor) {
#if ATTN_QAT_HAS_E2M1
  const uint32_t codes = ptx::cvt_rn_satfinite_e2m1x2_f32(p1 * reciprocal, p0 * reciprocal);
  const uint32_t halves = ptx::cvt_rn_f16x2_e2m1x2(codes);
  const float2 values = __half22float2(reinterpret_cast<const __half2&>(halves));
  p0 = values.x * factor;
  p1 = values.y * factor;
#else
  p0 = round_saturated_e2m1_times_2pow_minus_24(__saturatef(p0 * reciprocal)) * factor;
  p1 = round_saturated_e2m1_times_2pow_minus_24(__saturatef(p1 * reciprocal)) * factor;
#endif
}

// p0, p1 (not negative) become code * factor, where factor is the block's scale times whatever the caller
// folds in.
__device__ __forceinline__ void quantize_pair(float& p0, float& p1, float reciprocal, float factor) {
  quantize_pair_in_units(p0, p1, reciprocal, factor * kCodeUnit);
}

// quantize_pair_in_units, packed. `factor` is a scale times a power of two: in BF16 it and the products are exact, so one
// packed multiplication does for two.
template <class T>
__device__ __forceinline__ uint32_t quantize_and_pack(float p0, float p1, float reciprocal, float factor, T) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    quantize_pair_in_units(p0, p1, reciprocal, 1.0f);
    const __nv_bfloat162 products =
        __hmul2(__floats2bfloat162_rn(p0, p1), __floats2bfloat162_rn(factor, factor));
    return reinterpret_cast<const uint32_t&>(products);
  } else {
    quantize_pair_in_units(p0, p1, reciprocal, factor);
    return pack(p0, p1, T{});
  }
}

}  // namespace attn_qat::tile
