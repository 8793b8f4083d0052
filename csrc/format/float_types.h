// 16-bit float conversions, the same bits on host and device.
// Includes the C++ library only.
#pragma once
#include <cstdint>

// always_inline: the CPU kernels compile this header once per instruction set, and a shared out-of-line copy
// could carry instructions the running processor lacks.
#if defined(__CUDACC__)
#define ATTN_QAT_HD __host__ __device__ __forceinline__
#else
#define ATTN_QAT_HD [[gnu::always_inline]] inline
#endif

namespace attn_qat {

ATTN_QAT_HD constexpr uint32_t float_bits(float x) { return __builtin_bit_cast(uint32_t, x); }
ATTN_QAT_HD constexpr float bits_float(uint32_t u) { return __builtin_bit_cast(float, u); }

ATTN_QAT_HD constexpr float bfloat16_to_float(uint16_t h) {
  return bits_float(static_cast<uint32_t>(h) << 16);
}

// Nearest even; NaN stays NaN.
ATTN_QAT_HD constexpr uint16_t float_to_bfloat16(float x) {
  const uint32_t u = float_bits(x);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

ATTN_QAT_HD constexpr float round_to_bfloat16(float x) { return bfloat16_to_float(float_to_bfloat16(x)); }

ATTN_QAT_HD constexpr float float16_to_float(uint16_t h) {
  const uint32_t magnitude = static_cast<uint32_t>(h & 0x7fffu) << 13;
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  // The multiply moves the exponent bias from 15 to 127 and normalises subnormals.
  const uint32_t finite = float_bits(bits_float(magnitude) * 0x1p112f);
  const uint32_t value = magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : finite;
  return bits_float(value | sign);
}

// Nearest even; overflow goes to infinity; NaN stays NaN.
ATTN_QAT_HD constexpr uint16_t float_to_float16(float x) {
  const uint32_t u = float_bits(x) & 0x7fffffffu;
  const uint32_t sign = (float_bits(x) >> 16) & 0x8000u;
  // Adding 0.5 rounds at 2^-24, the step of FP16 subnormals. The clamp keeps the unused branch finite.
  const uint32_t small = u < 0x38800000u ? u : 0u;
  const uint32_t subnormal = float_bits(bits_float(small) + 0.5f) - float_bits(0.5f);
  const uint32_t normal = (u + 0xfffu + ((u >> 13) & 1u) - (112u << 23)) >> 13;
  uint32_t h = u < 0x38800000u ? subnormal : normal;
  h = u >= 0x477ff000u ? 0x7c00u : h;
  h = u > 0x7f800000u ? 0x7e00u : h;
  return static_cast<uint16_t>(h | sign);
}

}  // namespace attn_qat
