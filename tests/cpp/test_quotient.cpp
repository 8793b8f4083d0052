// The hardware E2M1 path, emulated: converting tile::quotient to E2M1 must give the value of the exact
// quotient. e2m1_encode(q, 1) is what the conversion instruction computes: nearest even, saturated at 6, for
// a scale of one. Values are compared, not codes: the sign of a zero is free.
#include <gtest/gtest.h>

#include <cmath>

#include "cuda/tile/quotient.h"
#include "format/nvfp4.h"

namespace attn_qat {
namespace {

constexpr float kMidpoints[] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};
constexpr int kFirstScale = 1, kLastScale = 0x7e;  // E4M3 bytes of 2^-9 and 448

float quotient_of(float x, float scale) { return tile::quotient(x, scale, 1.0f / scale); }

void expect_same_value(float x, float scale) {
  const float converted = nvfp4::e2m1_decode(nvfp4::e2m1_encode(quotient_of(x, scale), 1.0f));
  ASSERT_EQ(converted, nvfp4::e2m1_decode(nvfp4::e2m1_encode(x, scale))) << "x " << x << " scale " << scale;
}

// A block with x in it has this scale or a larger one.
float smallest_scale(float x) { return nvfp4::block_scale(nvfp4::magnitude_bits(x)); }

// Steps of one place away from x, over zero as well.
float ulps_away(float x, int steps) {
  for (; steps > 0; --steps) x = std::nextafter(x, INFINITY);
  for (; steps < 0; ++steps) x = std::nextafter(x, -INFINITY);
  return x;
}

TEST(Quotient, KeepsTheValueAroundEveryMidpointOfEveryScale) {
  for (int byte = kFirstScale; byte <= kLastScale; ++byte) {
    const float scale = nvfp4::e4m3_decode(static_cast<uint8_t>(byte));
    for (float midpoint : kMidpoints) {
      for (int steps = -64; steps <= 64; ++steps) {
        const float x = ulps_away(scale * midpoint, steps);
        ASSERT_EQ(quotient_of(x, scale), x / scale) << "x " << x << " scale " << scale;
        ASSERT_NO_FATAL_FAILURE(expect_same_value(x, scale));
        ASSERT_NO_FATAL_FAILURE(expect_same_value(-x, scale));
      }
    }
  }
}

template <class Decode>
void expect_values_of_all_16_bit_patterns(Decode decode) {
  for (int byte = kFirstScale; byte <= kLastScale; ++byte) {
    const float scale = nvfp4::e4m3_decode(static_cast<uint8_t>(byte));
    for (uint32_t bits = 0; bits < 0x10000u; ++bits) {
      const float x = decode(static_cast<uint16_t>(bits));
      if (!std::isfinite(x) || scale < smallest_scale(x)) continue;
      ASSERT_NO_FATAL_FAILURE(expect_same_value(x, scale));
    }
  }
}

TEST(Quotient, KeepsTheValueOfEveryBfloat16) { expect_values_of_all_16_bit_patterns(bfloat16_to_float); }

TEST(Quotient, KeepsTheValueOfEveryFloat16) { expect_values_of_all_16_bit_patterns(float16_to_float); }

// FP32 at large: every 251st bit pattern (coprime to powers of two) meets the scales in turn.
TEST(Quotient, KeepsTheValueOfFloat32) {
  int byte = kFirstScale;
  for (uint32_t bits = 0; bits < nvfp4::kInfinityBits; bits += 251) {
    const float x = bits_float(bits), scale = nvfp4::e4m3_decode(static_cast<uint8_t>(byte));
    if (scale >= smallest_scale(x)) {
      ASSERT_NO_FATAL_FAILURE(expect_same_value(x, scale));
    }
    byte = byte == kLastScale ? kFirstScale : byte + 1;
  }
}

TEST(Quotient, IsNaNUnderANaNScale) {
  EXPECT_TRUE(std::isnan(quotient_of(1.0f, nvfp4::block_scale(nvfp4::kInfinityBits))));
}

TEST(RefinedReciprocal, IsTheNearestForEveryScale) {
  for (int byte = kFirstScale; byte <= kLastScale; ++byte) {
    const float scale = nvfp4::e4m3_decode(static_cast<uint8_t>(byte));
    for (int steps = -2; steps <= 2; ++steps)
      ASSERT_EQ(tile::refined_reciprocal(ulps_away(1.0f / scale, steps), scale), 1.0f / scale) << scale;
  }
}

// What the software path takes instead of a conversion, in units of one and of 2^8.
TEST(RoundE2m1, IsTheNearestCodeInAnyUnit) {
  for (uint32_t bits = 0; bits <= float_bits(nvfp4::kE2m1Max); bits += 251) {
    const float y = bits_float(bits), want = nvfp4::e2m1_magnitude(y, 1.0f);
    for (float unit : {1.0f, 0x1p8f})
      ASSERT_EQ(tile::round_e2m1_times_2pow_minus_22(y * unit, unit), want * unit * 0x1p-22f) << y;
  }
}

// What P takes: u = y / 5.125 saturated. u is a rounded quotient, so that midpoints and their neighbours are left out.
TEST(RoundSaturatedE2m1, IsTheNearestCodeBesideMidpoints) {
  for (uint32_t bits = 0; bits <= float_bits(9.0f); bits += 251) {
    const float y = bits_float(bits), want = nvfp4::e2m1_magnitude(y, 1.0f);
    bool beside_midpoint = false;
    for (float midpoint : {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f})
      beside_midpoint |= std::fabs(y - midpoint) <= 2 * midpoint * 0x1p-23f;
    const float u = std::fmin(y / tile::kE2m1Saturation, 1.0f);
    if (!beside_midpoint) ASSERT_EQ(tile::round_saturated_e2m1_times_2pow_minus_24(u), want * 0x1p-24f) << y;
  }
}

}  // namespace
}  // namespace attn_qat
