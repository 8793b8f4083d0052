// Quantisation of values in registers: by the hardware conversion where there is one, by the rules of
// format/nvfp4.h elsewhere. Both give the same bits; quotient.h says why.
#pragma once
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "cuda/ptx/cvt.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/quotient.h"
#include "format/nvfp4.h"

namespace attn_qat::tile {

inline constexpr float kSixth = 1.0f / nvfp4::kE2m1Max;

// ---- block scale ----

// The hardware's E4M3 conversion rounds to nearest even, saturates and knows subnormals. quotient() is RN(x
// / 6) wherever that is not far below the floor (the host tests it).
__device__ __forceinline__ __nv_fp8_storage_t e4m3_of_sixth(float amax) {
  return __nv_cvt_float_to_fp8(quotient(amax, nvfp4::kE2m1Max, kSixth), __NV_SATFINITE, __NV_E4M3);
}

__device__ __forceinline__ float e4m3_value(__nv_fp8_storage_t byte) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(byte, __NV_E4M3)));
}

// nvfp4::block_scale of a finite magnitude.
__device__ __forceinline__ float block_scale_of_magnitude(float amax) {
  return fmaxf(e4m3_value(e4m3_of_sixth(amax)), nvfp4::kMinScale);
}

// Byte of nvfp4::block_scale: at least 1, which is 2^-9. NaN comes through as NaN, and so does Inf, because
// the remainder that quotient() takes is Inf - Inf.
__device__ __forceinline__ uint8_t block_scale_byte(uint32_t amax_bits) {
  const unsigned byte = e4m3_of_sixth(bits_float(amax_bits));
  return static_cast<uint8_t>(byte > 1u ? byte : 1u);
}

// nvfp4::block_scale: NaN for a block that holds NaN or Inf.
__device__ __forceinline__ float block_scale(uint32_t amax_bits) {
  return e4m3_value(block_scale_byte(amax_bits));
}

__device__ __forceinline__ float scale_reciprocal(float scale) {
  return refined_reciprocal(ptx::rcp_approx_ftz(scale), scale);
}

// ---- values ----

// x[i] becomes its nearest code * scale. A NaN scale makes every value NaN.
template <int N>
__device__ __forceinline__ void fake_quantize(float (&x)[N], float scale) {
  const float reciprocal = scale_reciprocal(scale);
#if ATTN_QAT_HAS_E2M1
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
  const float scaled = scale * 0x1p22f;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float y = fminf(fabsf(quotient(x[i], scale, reciprocal)), nvfp4::kE2m1Max);
    x[i] = copysignf(round_e2m1_times_2pow_minus_22(y) * scaled, x[i]);
  }
#endif
}

// ---- codes: four bits each, eight to a word, code i in bits 4 (i % 8) to 4 (i % 8) + 3 of word i / 8 ----

inline constexpr int kCodesPerWord = 8;

template <int N>
using CodeWords = uint32_t[(N + kCodesPerWord - 1) / kCodesPerWord];

// Without hardware FP16 stands between: bits 9 to 11 of v * 2^-14 are the code of v (1/2 is a subnormal
// there). A word of codes is four pairs (j, j + 4), as codes 16 bits apart need the same shift.
inline constexpr int kPairs = 4, kCodeBit = 9;
inline constexpr uint32_t kCodeMask = 0x00070007u << kCodeBit;

__device__ __forceinline__ uint32_t shift_left(uint32_t x, int by) { return by >= 0 ? x << by : x >> -by; }

// Codes of |x[i]|, their sign bits 0. A NaN scale makes every code 0.
template <int N>
__device__ __forceinline__ void e2m1_codes(const float (&x)[N], float scale, CodeWords<N>& words) {
  const float reciprocal = scale_reciprocal(scale);
#pragma unroll
  for (int first = 0; first < N; first += kCodesPerWord) {
    uint32_t word = 0;
#if ATTN_QAT_HAS_E2M1
    float y[kCodesPerWord] = {};
#pragma unroll
    for (int i = 0; i < kCodesPerWord && first + i < N; ++i) y[i] = quotient(x[first + i], scale, reciprocal);
#pragma unroll
    for (int i = 0; i < kCodesPerWord && first + i < N; i += 2)
      word |= ptx::cvt_rn_satfinite_e2m1x2_f32(y[i + 1], y[i]) << 4 * i;
#else
    constexpr float kUnit = 0x1p8f;  // that rounding leaves v * 2^-14
    float y[kCodesPerWord] = {};
#pragma unroll
    for (int i = 0; i < kCodesPerWord && first + i < N; ++i) {
      const float magnitude = fabsf(quotient(x[first + i], scale * (1.0f / kUnit), reciprocal * kUnit));
      y[i] = round_e2m1_times_2pow_minus_22(magnitude, kUnit);
    }
#pragma unroll
    for (int j = 0; j < kPairs && first + j < N; ++j) {
      const __half2 pair = __floats2half2_rn(y[j], y[j + kPairs]);
      // kCodeMask is a pair of sixes, and magnitudes order like their bits: this saturates.
      const uint32_t codes = __vminu2(reinterpret_cast<const uint32_t&>(pair), kCodeMask);
      word |= shift_left(codes, 4 * j - kCodeBit);
    }
#endif
    // Under a NaN scale both paths have found sixes.
    words[first / kCodesPerWord] = scale == scale ? word & 0x77777777u : 0u;
  }
}

// x[i] = code i * scale, exact for every scale byte.
template <int N>
__device__ __forceinline__ void e2m1_values(uint32_t codes, float scale, float (&x)[N]) {
  static_assert(N <= kCodesPerWord);
#if ATTN_QAT_HAS_E2M1
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    const uint32_t halves = ptx::cvt_rn_f16x2_e2m1x2(codes >> 4 * i);
    const float2 pair = __half22float2(reinterpret_cast<const __half2&>(halves));
    x[i] = pair.x * scale;
    if (i + 1 < N) x[i + 1 < N ? i + 1 : i] = pair.y * scale;
  }
#else
  const float scaled = scale * 0x1p14f;
#pragma unroll
  for (int j = 0; j < kPairs && j < N; ++j) {
    const uint32_t magnitudes = shift_left(codes, kCodeBit - 4 * j) & kCodeMask;
    const uint32_t halves = magnitudes | (codes << (12 - 4 * j) & 0x80008000u);
    const float2 pair = __half22float2(reinterpret_cast<const __half2&>(halves));
    x[j] = pair.x * scaled;
    if (j + kPairs < N) x[j + kPairs < N ? j + kPairs : j] = pair.y * scaled;
  }
#endif
}

// Sign bits of eight codes: bit 7 of byte i of `even` and `odd` is the sign of value 2 i and 2 i + 1.
__device__ __forceinline__ uint32_t code_signs(uint32_t even, uint32_t odd) {
  return (even >> 4 & 0x08080808u) | (odd & 0x80808080u);
}

// Byte kByte of four words.
template <int kByte>
__device__ __forceinline__ uint32_t gather_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  constexpr uint32_t kSelect = kByte | (kByte + 4) << 4;
  return __byte_perm(__byte_perm(a, b, kSelect), __byte_perm(c, d, kSelect), 0x5410);
}

}  // namespace attn_qat::tile
