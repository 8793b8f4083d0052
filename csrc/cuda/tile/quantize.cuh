// Fake quantisation of values in registers: by the hardware conversion where there is one, by format/nvfp4.h
// elsewhere. Both give the same bits; quotient.h says why.
#pragma once
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "cuda/ptx/cvt.cuh"
#include "cuda/tile/quotient.h"
#include "format/nvfp4.h"

namespace attn_qat::tile {

inline constexpr float kSixth = 1.0f / nvfp4::kE2m1Max;

// nvfp4::block_scale of a finite magnitude, with the hardware's E4M3 conversion: it rounds to nearest even, saturates
// and knows subnormals. quotient() is RN(x / 6) wherever that is not far below the floor (the host tests it).
__device__ __forceinline__ float block_scale_of_magnitude(float amax) {
  const __nv_fp8_storage_t code =
      __nv_cvt_float_to_fp8(quotient(amax, nvfp4::kE2m1Max, kSixth), __NV_SATFINITE, __NV_E4M3);
  return fmaxf(__half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3))), nvfp4::kMinScale);
}

// nvfp4::block_scale: NaN for a block that holds NaN or Inf.
__device__ __forceinline__ float block_scale(uint32_t amax_bits) {
  return amax_bits < nvfp4::kInfinityBits ? block_scale_of_magnitude(bits_float(amax_bits)) : bits_float(0x7fc00000u);
}

// x[i] becomes its nearest code * scale. A NaN scale makes every value NaN.
template <int N>
__device__ __forceinline__ void fake_quantize(float (&x)[N], float scale) {
#if ATTN_QAT_HAS_E2M1
  const float reciprocal = __frcp_rn(scale);
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    const float low = quotient(x[i], scale, reciprocal);
    const float high = i + 1 < N ? quotient(x[i + 1 < N ? i + 1 : i], scale, reciprocal) : 0.0f;
    const uint32_t halves = ptx::cvt_rn_f16x2_e2m1x2(ptx::cvt_rn_satfinite_e2m1x2_f32(high, low));
    const float2 codes = __half22float2(reinterpret_cast<const __half2&>(halves));
    x[i] = codes.x * scale;
    if (i + 1 < N) x[i + 1 < N ? i + 1 : i] = codes.y * scale;
  }
#else
  const float reciprocal = __frcp_rn(scale), scaled = scale * 0x1p22f;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float y = fminf(quotient(fabsf(x[i]), scale, reciprocal), nvfp4::kE2m1Max);
    x[i] = copysignf(round_e2m1_times_2pow_minus_22(y) * scaled, x[i]);
  }
#endif
}

}  // namespace attn_qat::tile
