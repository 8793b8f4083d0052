// The NVFP4 number format: E2M1 values in blocks of 16 that share one E4M3 scale.
//
//   scale = e4m3(max(amax / 6, 2^-9))        nearest even, saturated at 448
//   code  = e2m1(x / scale)                  exact quotient, nearest even, saturated at 6
//   value = code * scale                     exact in BF16 and FP16
//
// The only C++ file that spells 16, 6 and 448. Every decision is exact: |x| is compared with scale *
// midpoint, a product of a 4-bit and a 3-bit significand, which FP32 holds exactly; a reciprocal or a rounded
// quotient is not.
#pragma once
#include "float_types.h"

namespace attn_qat::nvfp4 {

inline constexpr int kBlock = 16;
inline constexpr float kE2m1Max = 6.0f;
inline constexpr float kE4m3Max = 448.0f;
inline constexpr float kMinScale = 0x1p-9f;  // smallest positive E4M3 value
inline constexpr uint8_t kE4m3NaN = 0x7f;

// |x| as ordered bits: integer comparison orders magnitudes and puts NaN and Inf above every finite value.
ATTN_QAT_HD constexpr uint32_t magnitude_bits(float x) { return float_bits(x) & 0x7fffffffu; }
inline constexpr uint32_t kInfinityBits = 0x7f800000u;

// ---- E4M3, non-negative half ----

// Nearest E4M3 value of a finite x >= 0: ties to even, saturated at 448.
ATTN_QAT_HD constexpr float e4m3_round(float x) {
  const float clamped = x < kE4m3Max ? x : kE4m3Max;
  const uint32_t u = float_bits(clamped);
  const float normal = bits_float((u + 0x7ffffu + ((u >> 20) & 1u)) & 0xfff00000u);
  // Below 2^-6 the step is 2^-9: adding 1.5 * 2^14 makes that the last place of the sum.
  const float subnormal = (clamped + 0x1.8p14f) - 0x1.8p14f;
  return clamped < 0x1p-6f ? subnormal : normal;
}

// Byte of a value that e4m3_round returned (or NaN).
ATTN_QAT_HD constexpr uint8_t e4m3_encode(float value) {
  const uint32_t u = float_bits(value);
  if (u >= kInfinityBits) return kE4m3NaN;
  return value < 0x1p-6f ? static_cast<uint8_t>(value * 0x1p9f)
                         : static_cast<uint8_t>((u >> 20) - (120u << 3));
}

ATTN_QAT_HD constexpr float e4m3_decode(uint8_t byte) {
  if ((byte & 0x7f) == kE4m3NaN) return bits_float(0x7fc00000u);
  const float magnitude =
      byte & 0x78 ? bits_float(((byte & 0x7fu) + (120u << 3)) << 20) : (byte & 7) * 0x1p-9f;
  return byte & 0x80 ? -magnitude : magnitude;
}

// ---- block scale ----

// Scale of a block from the bits of its largest magnitude; NaN when the block holds NaN or Inf.
ATTN_QAT_HD constexpr float block_scale(uint32_t amax_bits) {
  const float quotient = bits_float(amax_bits) / kE2m1Max;
  const float scale = e4m3_round(quotient > kMinScale ? quotient : kMinScale);
  return amax_bits < kInfinityBits ? scale : bits_float(0x7fc00000u);
}

// ---- E2M1 ----

// Values 0 .5 1 1.5 2 3 4 6 by code. A midpoint goes to the even code: `>` keeps the lower one, `>=` takes
// the upper. Real is float, or a compiler vector of floats; `zero +` turns a constant into either.
template <class Real>
ATTN_QAT_HD constexpr Real e2m1_magnitude(Real a, Real s) {
  const Real zero = Real{};
  Real v = a > 0.25f * s ? zero + 0.5f : zero;
  v = a >= 0.75f * s ? zero + 1.0f : v;
  v = a > 1.25f * s ? zero + 1.5f : v;
  v = a >= 1.75f * s ? zero + 2.0f : v;
  v = a > 2.5f * s ? zero + 3.0f : v;
  v = a >= 3.5f * s ? zero + 4.0f : v;
  return a > 5.0f * s ? zero + kE2m1Max : v;
}

// Nearest code * scale of x: the fake-quantised value. NaN scale gives NaN.
ATTN_QAT_HD constexpr float fake_quantize(float x, float scale) {
  const uint32_t sign = float_bits(x) & 0x80000000u;
  const float magnitude = e2m1_magnitude(bits_float(magnitude_bits(x)), scale) * scale;
  return bits_float(float_bits(magnitude) | sign);
}

// 4-bit code of x under scale: sign in bit 3. Under a NaN scale no comparison holds and the code is 0.
ATTN_QAT_HD constexpr uint8_t e2m1_encode(float x, float scale) {
  const float a = bits_float(magnitude_bits(x));
  const int code = (a > 0.25f * scale) + (a >= 0.75f * scale) + (a > 1.25f * scale) + (a >= 1.75f * scale) +
                   (a > 2.5f * scale) + (a >= 3.5f * scale) + (a > 5.0f * scale);
  return static_cast<uint8_t>(code | (float_bits(x) >> 31 << 3));
}

ATTN_QAT_HD constexpr float e2m1_decode(uint8_t code) {
  const uint32_t exponent = (code >> 1) & 3u, mantissa = code & 1u;
  const float magnitude = exponent ? bits_float((exponent + 126u) << 23 | mantissa << 22) : mantissa * 0.5f;
  return code & 8 ? -magnitude : magnitude;
}

// Offset of scale (row, block) in the 128x4 tiled layout that block-scaled tensor-core GEMMs read: 512-byte
// tiles in row-major order, `tiles_per_row` = ceil(blocks / 4).
ATTN_QAT_HD constexpr int64_t tiled_scale_offset(int64_t row, int64_t block, int64_t tiles_per_row) {
  const int64_t tile = row / 128 * tiles_per_row + block / 4;
  return tile * 512 + row % 32 * 16 + row % 128 / 32 * 4 + block % 4;
}

}  // namespace attn_qat::nvfp4
