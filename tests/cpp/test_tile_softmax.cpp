// The softmax primitives of every instruction set: masks, exp2, probabilities of the forward and the
// backward.
#include <gtest/gtest.h>

#include <algorithm>

#include "format/nvfp4.h"
#include "tile_testing.h"

namespace attn_qat::cpu {
namespace {

using attn_qat::testing::kInf;
using attn_qat::testing::kNaN;
using attn_qat::testing::Random;

constexpr int64_t kRows = 5, kCols = 48, kLd = kCols + 16;
constexpr Recipe kRecipes[] = {Recipe::kCudnn, Recipe::kFp4, Recipe::kFp4Qk};

class TileSoftmax : public TileTest {
 protected:
  std::vector<float> exp2_of(std::vector<float> t) const {
    while (t.size() % nvfp4::kBlock != 0) t.push_back(0.0f);
    const float exponent = 0.0f;
    float sum = 0.0f;
    const int64_t cols = static_cast<int64_t>(t.size());
    ops.forward_probabilities(t.data(), cols, 1, cols, &exponent, 0, nullptr, &sum);
    return t;
  }
};

INSTANTIATE_TEST_SUITE_P(Isa, TileSoftmax, ::testing::ValuesIn(all_sets()), set_name);

size_t at(int64_t row, int64_t col) { return static_cast<size_t>(row * kLd + col); }

bool visible(int64_t row, int64_t col, int64_t first_limit, bool causal) {
  return col < first_limit + (causal ? row : 0);
}

// ---- mask ----

TEST_P(TileSoftmax, ScaleAndMask) {
  const std::vector<float> scores = Random(1).normals(kRows * kLd);
  const float scale = 0.37f;
  for (bool causal : {false, true})
    for (int64_t first_limit :
         {-kRows - 1, int64_t{-1}, int64_t{0}, int64_t{17}, kCols - 1, kCols, kCols + 9}) {
      std::vector<float> t = scores;
      std::vector<float> top = {-kInf, -kInf, 100.0f, -kInf, 0.1f};
      const std::vector<float> before = top;
      ops.scale_and_mask(t.data(), kLd, kRows, kCols, scale, first_limit, causal, top.data());
      for (int64_t r = 0; r < kRows; ++r) {
        float want_top = before[static_cast<size_t>(r)];
        for (int64_t c = 0; c < kCols; ++c) {
          const float want = visible(r, c, first_limit, causal) ? scores[at(r, c)] * scale : -kInf;
          ASSERT_EQ(t[at(r, c)], want) << r << ", " << c << " limit " << first_limit << " causal " << causal;
          want_top = std::max(want_top, want);
        }
        ASSERT_EQ(top[static_cast<size_t>(r)], want_top);
        for (int64_t c = kCols; c < kLd; ++c) ASSERT_EQ(t[at(r, c)], scores[at(r, c)]);
      }
    }
}

// ---- exp2 ----

TEST_P(TileSoftmax, Exp2IsWithinTwoUlp) {
  std::vector<float> t;
  for (float x = -126.0f; x < 127.0f; x += 0.00317f) t.push_back(x);
  for (float x = -0.001f; x < 0.001f; x += 1e-6f) t.push_back(x);
  const std::vector<float> p = exp2_of(t);
  for (size_t i = 0; i < t.size(); ++i) {
    const double want = std::exp2(static_cast<double>(t[i]));
    const double ulp = std::ldexp(1.0, std::ilogb(want) - 23);
    ASSERT_LE(std::fabs(p[i] - want), 2 * ulp) << "x " << t[i];
  }
}

TEST_P(TileSoftmax, Exp2OfIntegersIsExact) {
  std::vector<float> t;
  for (int n = -126; n <= 127; ++n) t.push_back(static_cast<float>(n));
  const std::vector<float> p = exp2_of(t);
  for (size_t i = 0; i < t.size(); ++i) ASSERT_EQ(p[i], std::ldexp(1.0f, static_cast<int>(t[i]))) << t[i];
}

TEST_P(TileSoftmax, Exp2FlushesTinyValuesAndKeepsNaN) {
  const std::vector<float> p = exp2_of({-kInf, -1e30f, -127.0f, std::nextafter(-126.0f, -kInf), kNaN, -kNaN});
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(p[i], 0.0f) << i;
  EXPECT_TRUE(std::isnan(p[4]));
  EXPECT_TRUE(std::isnan(p[5]));
}

// ---- forward ----

// fp4(x * 2^gain) * 2^-gain over a row of blocks.
std::vector<float> quantized(std::vector<float> x, int gain) {
  for (size_t start = 0; start < x.size(); start += nvfp4::kBlock) {
    uint32_t amax = 0;
    for (size_t i = start; i < start + nvfp4::kBlock; ++i)
      amax = std::max(amax, nvfp4::magnitude_bits(std::ldexp(x[i], gain)));
    const float scale = nvfp4::block_scale(amax);
    for (size_t i = start; i < start + nvfp4::kBlock; ++i)
      x[i] = std::ldexp(nvfp4::fake_quantize(std::ldexp(x[i], gain), scale), -gain);
  }
  return x;
}

std::vector<float> row_of(const std::vector<float>& tile, int64_t row) {
  return {tile.begin() + row * kLd, tile.begin() + row * kLd + kCols};
}

// The tests here and in test_cpu_kernels take the gain from params.h; these are its values (contract section 3).
TEST(ProbabilityGain, FillsTheRangeOfTheFormatInRecipeFp4) {
  EXPECT_EQ(probability_gain(Recipe::kFp4), 11);
  EXPECT_EQ(probability_gain(Recipe::kCudnn), 0);
}

TEST_P(TileSoftmax, ForwardProbabilities) {
  for (Recipe recipe : kRecipes) {
    const int gain = probability_gain(recipe);
    std::vector<float> t = Random(2).normals(kRows * kLd), quantised(t.size(), 5.0f);
    for (float& x : t) x = 4 * x - 3;
    t[at(1, 7)] = -kInf;  // masked
    const std::vector<float> scores = t;
    const float exponent[kRows] = {3, 0, 9, -2, 5};
    std::vector<float> sum = {0, 1, 0, 0, 0.5};
    const std::vector<float> before = sum;
    ops.forward_probabilities(t.data(), kLd, kRows, kCols, exponent, gain, quantised.data(), sum.data());
    for (int64_t r = 0; r < kRows; ++r) {
      double want_sum = before[static_cast<size_t>(r)];
      for (int64_t c = 0; c < kCols; ++c) {
        const double want = std::exp2(static_cast<double>(scores[at(r, c)] - exponent[r]));
        ASSERT_NEAR(t[at(r, c)], want, 0x1p-21 * want) << r << ", " << c;
        want_sum += want;
      }
      ASSERT_NEAR(sum[static_cast<size_t>(r)], want_sum, 1e-6 * want_sum);
      ASSERT_EQ(row_of(quantised, r), quantized(row_of(t, r), gain)) << "row " << r << " gain " << gain;
    }
  }
}

// ---- backward ----

struct BackwardTile {
  std::vector<float> s, dp;
  std::vector<RowStatistics> rows;
  float scale;
  int64_t first_limit;
  bool causal;
};

// p and dS from their definitions in double; the left operand of dV quantised from the float p.
void check_backward(const TileOps& ops, const BackwardTile& x, Recipe recipe) {
  std::vector<float> left = x.s, ds = x.dp;
  ops.backward_probabilities(left.data(), ds.data(), kLd, kRows, kCols, x.scale, x.first_limit, x.causal,
                             x.rows.data(), recipe);
  for (int64_t r = 0; r < kRows; ++r) {
    const RowStatistics& row = x.rows[static_cast<size_t>(r)];
    std::vector<float> p(kCols, 0.0f);
    for (int64_t c = 0; c < kCols; ++c) {
      if (!visible(r, c, x.first_limit, x.causal)) {
        ASSERT_EQ(ds[at(r, c)], 0.0f) << r << ", " << c;
        continue;
      }
      const double exact = std::exp2(static_cast<double>(x.s[at(r, c)] * x.scale - row.exponent));
      const double want = exact * row.normaliser * (x.dp[at(r, c)] - row.delta);
      ASSERT_NEAR(ds[at(r, c)], want, 0x1.01p-8 * std::fabs(want)) << r << ", " << c;  // one BF16 rounding
      ASSERT_EQ(round_to_bfloat16(ds[at(r, c)]), ds[at(r, c)]);
      p[static_cast<size_t>(c)] = static_cast<float>(exact);
    }
    std::vector<float> want = p;
    if (recipe == Recipe::kFp4) want = quantized(p, probability_gain(recipe));
    for (float& value : want) value *= row.normaliser;
    if (recipe == Recipe::kCudnn) want = quantized(want, 0);
    for (int64_t c = 0; c < kCols; ++c)
      ASSERT_NEAR(left[at(r, c)], want[static_cast<size_t>(c)], 0x1p-21 * want[static_cast<size_t>(c)])
          << r << ", " << c << " recipe " << static_cast<int>(recipe);
    for (int64_t c = kCols; c < kLd; ++c) {
      ASSERT_EQ(left[at(r, c)], x.s[at(r, c)]);
      ASSERT_EQ(ds[at(r, c)], x.dp[at(r, c)]);
    }
  }
}

TEST_P(TileSoftmax, BackwardProbabilities) {
  // Multiples of 1/8, away from the midpoints of the quantiser by more than exp2's error.
  Random random(3);
  BackwardTile x{random.normals(kRows * kLd), random.normals(kRows * kLd), {}, 0.125f, 0, false};
  for (float& s : x.s) s = std::floor(24 * s);
  x.rows = {{3, 0.25f, 0.1f}, {0, 1.0f, -0.3f}, {9, 3e-3f, 0.0f}, {5, 0.7f, 1.0f}, {4, 1e-4f, 0.2f}};
  for (Recipe recipe : kRecipes)
    for (bool causal : {false, true})
      for (int64_t first_limit : {int64_t{-2}, int64_t{0}, int64_t{21}, kCols}) {
        x.causal = causal, x.first_limit = first_limit;
        ASSERT_NO_FATAL_FAILURE(check_backward(ops, x, recipe));
      }
}

TEST_P(TileSoftmax, BackwardOfARowWithoutKeysIsZero) {
  Random random(4);
  BackwardTile x{random.normals(kRows * kLd),
                 random.normals(kRows * kLd),
                 std::vector<RowStatistics>(kRows),
                 1.0f,
                 kCols,
                 false};
  for (Recipe recipe : kRecipes) {
    std::vector<float> left = x.s, ds = x.dp;
    ops.backward_probabilities(left.data(), ds.data(), kLd, kRows, kCols, x.scale, 0, false, x.rows.data(),
                               recipe);
    for (int64_t r = 0; r < kRows; ++r)
      for (int64_t c = 0; c < kCols; ++c) {
        ASSERT_EQ(left[at(r, c)], 0.0f);
        ASSERT_EQ(ds[at(r, c)], 0.0f);
      }
  }
}

}  // namespace
}  // namespace attn_qat::cpu
