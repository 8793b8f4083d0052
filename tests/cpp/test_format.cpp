// The number format: E4M3 scales, E2M1 codes, block scales, tiled scales, 16-bit floats.
// The expected values come from tables and powers of two written here, never from the functions under test.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <set>

#include "format/nvfp4.h"

namespace attn_qat {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

float above(float x) { return std::nextafter(x, kInf); }
float below(float x) { return std::nextafter(x, -kInf); }

// ---- E4M3 ----

constexpr int kLastByte = 0x7e;  // 448; 0x7f is NaN

// 4 exponent bits with bias 7, 3 mantissa bits; exponent 0 is subnormal.
double e4m3_value(int byte) {
  const int exponent = byte >> 3, mantissa = byte & 7;
  return exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
}

TEST(E4m3, DecodesEveryByte) {
  for (int byte = 0; byte <= kLastByte; ++byte) {
    EXPECT_EQ(nvfp4::e4m3_decode(static_cast<uint8_t>(byte)), e4m3_value(byte)) << "byte " << byte;
    EXPECT_EQ(nvfp4::e4m3_decode(static_cast<uint8_t>(byte | 0x80)), -e4m3_value(byte)) << "byte " << byte;
  }
  EXPECT_TRUE(std::isnan(nvfp4::e4m3_decode(0x7f)));
  EXPECT_TRUE(std::isnan(nvfp4::e4m3_decode(0xff)));
}

TEST(E4m3, EncodesEveryValueToItsByte) {
  for (int byte = 0; byte <= kLastByte; ++byte) {
    const float value = static_cast<float>(e4m3_value(byte));
    EXPECT_EQ(nvfp4::e4m3_round(value), value);
    EXPECT_EQ(nvfp4::e4m3_encode(value), byte);
  }
  EXPECT_EQ(nvfp4::e4m3_encode(kNaN), 0x7f);
}

TEST(E4m3, RoundsToNearestAndTiesToTheEvenByte) {
  for (int byte = 0; byte < kLastByte; ++byte) {
    const float low = static_cast<float>(e4m3_value(byte)), high = static_cast<float>(e4m3_value(byte + 1));
    const float middle = (low + high) / 2;  // exact
    EXPECT_EQ(nvfp4::e4m3_round(below(middle)), low) << "byte " << byte;
    EXPECT_EQ(nvfp4::e4m3_round(middle), byte % 2 == 0 ? low : high) << "byte " << byte;
    EXPECT_EQ(nvfp4::e4m3_round(above(middle)), high) << "byte " << byte;
  }
}

TEST(E4m3, SaturatesAt448) {
  for (float x : {448.0f, 449.0f, 464.0f, 1e4f, std::numeric_limits<float>::max()})
    EXPECT_EQ(nvfp4::e4m3_round(x), 448.0f) << x;
}

// ---- E2M1 ----

constexpr float kValues[] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};  // by code, without its sign

TEST(E2m1, DecodesEveryCode) {
  for (uint8_t code = 0; code < 8; ++code) {
    EXPECT_EQ(nvfp4::e2m1_decode(code), kValues[code]);
    EXPECT_EQ(nvfp4::e2m1_decode(code | 8), -kValues[code]);
  }
}

TEST(E2m1, RoundsToNearestAndTiesToTheEvenCodeUnderEveryScale) {
  for (int byte = 1; byte <= kLastByte; ++byte) {
    const float scale = static_cast<float>(e4m3_value(byte));
    for (int code = 0; code < 7; ++code) {
      const float middle = scale * ((kValues[code] + kValues[code + 1]) / 2);
      ASSERT_EQ(nvfp4::e2m1_encode(below(middle), scale), code) << "scale " << scale;
      ASSERT_EQ(nvfp4::e2m1_encode(middle, scale), code % 2 == 0 ? code : code + 1) << "scale " << scale;
      ASSERT_EQ(nvfp4::e2m1_encode(above(middle), scale), code + 1) << "scale " << scale;
      ASSERT_EQ(nvfp4::e2m1_encode(-above(middle), scale), (code + 1) | 8) << "scale " << scale;
    }
  }
}

// What makes the comparisons of e2m1_encode exact decisions.
TEST(E2m1, ScaleTimesMidpointIsExactInFloat) {
  for (int byte = 1; byte <= kLastByte; ++byte)
    for (int code = 0; code < 7; ++code) {
      const float scale = static_cast<float>(e4m3_value(byte)),
                  middle = (kValues[code] + kValues[code + 1]) / 2;
      ASSERT_EQ(static_cast<double>(scale * middle), static_cast<double>(scale) * middle);
    }
}

TEST(E2m1, SaturatesAtSix) {
  for (float x : {5.5f, 7.0f, 1e30f, kInf}) {
    EXPECT_EQ(nvfp4::fake_quantize(x, 1.0f), 6.0f) << x;
    EXPECT_EQ(nvfp4::fake_quantize(-x, 1.0f), -6.0f) << x;
  }
}

TEST(E2m1, FakeQuantizeIsDecodeOfEncodeTimesScale) {
  for (int byte = 1; byte <= kLastByte; ++byte) {
    const float scale = static_cast<float>(e4m3_value(byte));
    for (int step = -160; step <= 160; ++step) {
      const float x = scale * static_cast<float>(step) / 20.0f;
      const float value = nvfp4::e2m1_decode(nvfp4::e2m1_encode(x, scale)) * scale;
      ASSERT_EQ(nvfp4::fake_quantize(x, scale), value) << "x " << x << " scale " << scale;
    }
  }
}

TEST(E2m1, EveryDequantizedValueIsExactIn16Bits) {
  for (int byte = 1; byte <= kLastByte; ++byte)
    for (float value : kValues) {
      const float x = value * static_cast<float>(e4m3_value(byte));
      ASSERT_EQ(round_to_bfloat16(x), x);
      ASSERT_EQ(float16_to_float(float_to_float16(x)), x);
    }
}

// ---- scale of a block ----

float scale_of(float amax) { return nvfp4::block_scale(nvfp4::magnitude_bits(amax)); }

TEST(BlockScale, IsTheNearestE4m3OfASixth) {
  EXPECT_EQ(scale_of(6.0f), 1.0f);
  EXPECT_EQ(scale_of(1.0f), 0.171875f);
  EXPECT_EQ(scale_of(6.375f), 1.0f);         // 1.0625: a tie, down to even
  EXPECT_EQ(scale_of(7.125f), 1.25f);        // 1.1875: a tie, up to even
  EXPECT_EQ(scale_of(6.37890625f), 1.125f);  // just above the tie
  EXPECT_EQ(scale_of(-6.0f), 1.0f);          // the sign bit is not part of the magnitude
}

TEST(BlockScale, StaysWithinItsRange) {
  for (float amax : {0.0f, 1e-38f, 0.001f, 0x1p-8f}) EXPECT_EQ(scale_of(amax), 0x1p-9f) << amax;
  for (float amax : {2688.0f, 6000.0f, std::numeric_limits<float>::max()})
    EXPECT_EQ(scale_of(amax), 448.0f) << amax;
}

TEST(BlockScale, NaNMarksABlockWithNaNOrInf) {
  for (float amax : {kInf, -kInf, kNaN, -kNaN}) {
    EXPECT_TRUE(std::isnan(scale_of(amax))) << amax;
    EXPECT_TRUE(std::isnan(nvfp4::fake_quantize(1.0f, scale_of(amax)))) << amax;
    EXPECT_EQ(nvfp4::e4m3_encode(scale_of(amax)), 0x7f) << amax;
  }
}

// ---- tiled scales ----

TEST(TiledScales, FollowTheTensorCoreLayoutInsideATile) {
  EXPECT_EQ(nvfp4::tiled_scale_offset(0, 3, 1), 3);
  EXPECT_EQ(nvfp4::tiled_scale_offset(1, 0, 1), 16);
  EXPECT_EQ(nvfp4::tiled_scale_offset(32, 0, 1), 4);
  EXPECT_EQ(nvfp4::tiled_scale_offset(127, 3, 1), 511);
}

TEST(TiledScales, GiveEveryScaleAByteOfItsOwn) {
  constexpr int64_t kRows = 256, kTilesPerRow = 3;
  std::set<int64_t> offsets;
  for (int64_t row = 0; row < kRows; ++row)
    for (int64_t block = 0; block < kTilesPerRow * 4; ++block)
      offsets.insert(nvfp4::tiled_scale_offset(row, block, kTilesPerRow));
  EXPECT_EQ(static_cast<int64_t>(offsets.size()), kRows * kTilesPerRow * 4);
  EXPECT_EQ(*offsets.begin(), 0);
  EXPECT_EQ(*offsets.rbegin(), kRows * kTilesPerRow * 4 - 1);
}

// ---- 16-bit floats ----

// Checks conversion to and from a 16-bit format around every pattern: neighbours of a midpoint go their way,
// the midpoint itself to the even pattern.
template <class ToFloat, class FromFloat>
void check_rounding(ToFloat to_float, FromFloat from_float, uint16_t infinity) {
  for (uint16_t bits = 0; bits < infinity; ++bits) {
    const float x = to_float(bits);
    ASSERT_EQ(from_float(x), bits);
    ASSERT_EQ(from_float(-x), bits | 0x8000);
    if (bits + 1 == infinity) break;
    const float middle = static_cast<float>((static_cast<double>(x) + to_float(bits + 1)) / 2);  // exact
    ASSERT_EQ(from_float(below(middle)), bits) << "bits " << bits;
    ASSERT_EQ(from_float(middle), bits % 2 == 0 ? bits : bits + 1) << "bits " << bits;
    ASSERT_EQ(from_float(above(middle)), bits + 1) << "bits " << bits;
  }
  EXPECT_EQ(from_float(kInf), infinity);
  EXPECT_EQ(from_float(-kInf), infinity | 0x8000);
  EXPECT_TRUE(std::isnan(to_float(from_float(kNaN))));
  EXPECT_TRUE(std::isnan(to_float(from_float(bits_float(0x7f800001u)))));  // a payload in the low bits only
  EXPECT_EQ(from_float(std::numeric_limits<float>::max()), infinity);
}

TEST(Bfloat16, RoundsToNearestEven) { check_rounding(bfloat16_to_float, float_to_bfloat16, 0x7f80); }

TEST(Float16, RoundsToNearestEven) { check_rounding(float16_to_float, float_to_float16, 0x7c00); }

TEST(Float16, DecodesSubnormalsAndOverflowsToInfinity) {
  EXPECT_EQ(float16_to_float(1), 0x1p-24f);
  EXPECT_EQ(float16_to_float(0x03ff), 0x3ffp-24f);
  EXPECT_EQ(float16_to_float(0x7bff), 65504.0f);
  EXPECT_EQ(float_to_float16(below(65520.0f)), 0x7bff);
  EXPECT_EQ(float_to_float16(65520.0f), 0x7c00);
  EXPECT_EQ(float_to_float16(0x1p-25f), 0);  // half of the smallest: a tie, to even
  EXPECT_EQ(float_to_float16(above(0x1p-25f)), 1);
}

// Everything works at compile time as well: the GPU kernels build tables from it.
static_assert(nvfp4::block_scale(nvfp4::magnitude_bits(6.0f)) == 1.0f);
static_assert(nvfp4::fake_quantize(2.5f, 1.0f) == 2.0f && nvfp4::fake_quantize(-3.5f, 1.0f) == -4.0f);
static_assert(nvfp4::e4m3_encode(448.0f) == 0x7e && float_to_bfloat16(1.0f) == 0x3f80);

}  // namespace
}  // namespace attn_qat
