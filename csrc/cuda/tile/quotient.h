// The quotient that the hardware E2M1 conversion is given, on host and device (the host tests it).
//
// Claim: converting RN(x / s), the quotient rounded to FP32, gives the code of the exact x / s, for every
// E4M3 scale s. The two could differ only if rounding moved a quotient onto a midpoint m. But s * m is an
// FP32 number, so an x beside it is off by at least its last place, and
//     |x / s - m| >= ulp(s m) / s > ulp(m) / 2,
// as the significand of s is at most 1.875 < 2: such a quotient rounds to a neighbour of m, not to m itself.
// (Next to m = 1/4 with s a power of two, where the gap below s m is half as wide, the division is exact.)
//
// RN(x / s) itself takes no division: with r = RN(1 / s) and q = RN(x r), one step x - q s, exact in an FMA,
// and q + (x - q s) r give it (Markstein). Nothing overflows, because the scale of a block that holds x is at
// least about |x| / 6, or 448; and subnormal remainders spoil the last place of quotients far below 1/4 only.
#pragma once
#include <cmath>

#include "format/float_types.h"

namespace attn_qat::tile {

// x / scale rounded to nearest, where reciprocal = 1 / scale rounded to nearest.
ATTN_QAT_HD float quotient(float x, float scale, float reciprocal) {
  const float estimate = x * reciprocal;
  return ::fmaf(::fmaf(-estimate, scale, x), reciprocal, estimate);
}

// 1 / scale rounded to nearest, from an estimate within two last places. The step squares the relative
// error, to under 2^-42, and no E4M3 scale has a reciprocal that close to half way between two floats (the
// host tests it).
ATTN_QAT_HD float refined_reciprocal(float estimate, float scale) {
  return ::fmaf(::fmaf(-estimate, scale, 1.0f), estimate, estimate);
}

// The E2M1 magnitude nearest to 0 <= y <= 6, ties to the even code, times 2^-22. Both in the same unit, any
// power of two. Beyond 6 the result is no less than that of 6.
//
// With g any float in the binade whose last place is the E2M1 step at y, RN(g - y) rounds y to that step.
// max(y, 1.5) is one for y' = y 2^-22: its last place is 2^-23, 2^-22, 2^-21 from 1, 2, 4 on, steps of 1/2,
// 1, 2 in y. At a tie g is a multiple of many steps, so the even difference is the even code.
ATTN_QAT_HD float round_e2m1_times_2pow_minus_22(float y, float unit = 1.0f) {
  const float g = y > 1.5f * unit ? y : 1.5f * unit;
  return g - ::fmaf(y, -0x1p-22f, g);
}

// The E2M1 magnitude nearest to y = kE2m1Saturation u, times 2^-24, for u from 0 to 1: y beyond 5 is 6 already at 5.125.
// A y on a midpoint itself may go either way.
//
// u^2 + 0.34375 is a float whose last place is the E2M1 step at y 2^-24, as above: it reaches 1/2 at y = 2.03 and 1 at
// y = 4.15, and between the last common value of two steps and the next one of the larger, either rounds alike.
inline constexpr float kE2m1Saturation = 5.125f;
ATTN_QAT_HD float round_saturated_e2m1_times_2pow_minus_24(float u) {
  const float g = ::fmaf(u, u, 0.34375f);
  return g - ::fmaf(u, -kE2m1Saturation * 0x1p-24f, g);
}

}  // namespace attn_qat::tile
