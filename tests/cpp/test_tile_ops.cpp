// The tile primitives of every instruction set that this processor runs, against plain scalar definitions.
#include <gtest/gtest.h>

#include "format/nvfp4.h"
#include "tile_testing.h"

namespace attn_qat::cpu {
namespace {

using attn_qat::testing::kInf;
using attn_qat::testing::kNaN;
using attn_qat::testing::Random;

class TileOpsTest : public TileTest {};

INSTANTIATE_TEST_SUITE_P(Isa, TileOpsTest, ::testing::ValuesIn(all_sets()), set_name);

TEST(AvailableTileOps, EndWithThePlainSet) {
  ASSERT_FALSE(all_sets().empty());
  EXPECT_STREQ(all_sets().back()->name, "plain");
  EXPECT_EQ(&tile_ops(), all_sets().front());
}

// NaN equals NaN, and zeros of either sign are equal.
bool same(float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); }

// ---- matrix product ----

struct Product {
  int64_t m, n, k;
  bool a_by_columns, accumulate;
};

// Both layouts of A, with a gap after every line; C keeps what lies outside m x n.
void check_product(const TileOps& ops, Product p) {
  Random random(1);
  const int64_t lda = (p.a_by_columns ? p.m : p.k) + 3, ldb = p.n + 16, ldc = p.n + 16;
  const std::vector<float> a = random.normals(lda * (p.a_by_columns ? p.k : p.m)),
                           b = random.normals(ldb * p.k);
  const int64_t stride_m = p.a_by_columns ? 1 : lda, stride_k = p.a_by_columns ? lda : 1;
  const std::vector<float> before = random.normals(ldc * (p.m + 1));
  std::vector<float> c = before;
  ops.gemm({p.m, p.n, p.k, a.data(), stride_m, stride_k, b.data(), ldb, c.data(), ldc, p.accumulate});
  for (int64_t i = 0; i <= p.m; ++i)
    for (int64_t j = 0; j < ldc; ++j) {
      const size_t at = static_cast<size_t>(i * ldc + j);
      if (i == p.m || j >= p.n) {
        ASSERT_EQ(c[at], before[at]) << "outside C at (" << i << ", " << j << ")";
        continue;
      }
      double sum = p.accumulate ? before[at] : 0.0, size = std::fabs(sum);
      for (int64_t l = 0; l < p.k; ++l) {
        const double term = double{a[static_cast<size_t>(i * stride_m + l * stride_k)]} *
                            double{b[static_cast<size_t>(l * ldb + j)]};
        sum += term, size += std::fabs(term);
      }
      ASSERT_NEAR(c[at], sum, static_cast<double>(p.k + 1) * 0x1p-23 * size)
          << "(" << i << ", " << j << ") of " << p.m << "x" << p.n << "x" << p.k;
    }
}

TEST_P(TileOpsTest, GemmOfAnyRowsAndDepth) {
  for (int64_t m : {1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 64, 65})
    for (int64_t n : {16, 32, 48, 128})
      for (int64_t k : {1, 2, 17, 128})
        for (bool by_columns : {false, true})
          for (bool accumulate : {false, true})
            ASSERT_NO_FATAL_FAILURE(check_product(ops, {m, n, k, by_columns, accumulate}));
}

TEST_P(TileOpsTest, GemmSumsInOrder) {
  constexpr int64_t kM = 13, kN = 48, kK = 40, kSplit = 23;
  Random random(2);
  const std::vector<float> a = random.normals(kM * kK), b = random.normals(kK * kN);
  std::vector<float> once(kM * kN), twice(kM * kN);
  ops.gemm({kM, kN, kK, a.data(), kK, 1, b.data(), kN, once.data(), kN, false});
  ops.gemm({kM, kN, kSplit, a.data(), kK, 1, b.data(), kN, twice.data(), kN, false});
  ops.gemm(
      {kM, kN, kK - kSplit, a.data() + kSplit, kK, 1, b.data() + kSplit * kN, kN, twice.data(), kN, true});
  EXPECT_EQ(once, twice);
}

// ---- conversions ----

TEST_P(TileOpsTest, LoadConvertsAndPadsWithZeros) {
  constexpr int64_t kRows = 3, kStride = 40, kLd = 48;
  Random random(3);
  const std::vector<float> x = random.normals(kRows * kStride);
  std::vector<uint16_t> bf16, fp16;
  for (float value : x) bf16.push_back(float_to_bfloat16(value)), fp16.push_back(float_to_float16(value));
  for (int64_t cols : {1, 15, 16, 17, 33, 40}) {
    const auto check = [&](DType dtype, const void* src, auto expected) {
      std::vector<float> tile(kRows * kLd, kNaN);
      ops.load(src, dtype, kStride, kRows, cols, tile.data(), kLd);
      for (int64_t r = 0; r < kRows; ++r)
        for (int64_t c = 0; c < kLd; ++c) {
          const int64_t full = (cols + 15) / 16 * 16;
          const float want = c < cols   ? expected(static_cast<size_t>(r * kStride + c))
                             : c < full ? 0.0f
                                        : kNaN;
          ASSERT_TRUE(same(tile[static_cast<size_t>(r * kLd + c)], want)) << r << ", " << c << " of " << cols;
        }
    };
    check(DType::kFloat32, x.data(), [&](size_t i) { return x[i]; });
    check(DType::kBFloat16, bf16.data(), [&](size_t i) { return bfloat16_to_float(bf16[i]); });
    check(DType::kFloat16, fp16.data(), [&](size_t i) { return float16_to_float(fp16[i]); });
  }
}

TEST_P(TileOpsTest, StoreScalesRowsAndRoundsOnce) {
  constexpr int64_t kRows = 3, kLd = 48, kStride = 41;
  Random random(4);
  std::vector<float> x = random.normals(kRows * kLd);
  x[0] = kInf, x[1] = kNaN, x[2] = 1e38f, x[3] = 1e-8f, x[4] = 3.4e38f;
  const float row_scale[kRows] = {1.0f, 0.3f, 0.0f};
  for (int64_t cols : {1, 17, 40})
    for (const float* scale : {static_cast<const float*>(nullptr), row_scale}) {
      std::vector<uint16_t> bf16(kRows * kStride, 0xabcd), fp16(kRows * kStride, 0xabcd);
      std::vector<float> fp32(kRows * kStride, -7.0f);
      ops.store(x.data(), kLd, scale, kRows, cols, bf16.data(), DType::kBFloat16, kStride);
      ops.store(x.data(), kLd, scale, kRows, cols, fp16.data(), DType::kFloat16, kStride);
      ops.store(x.data(), kLd, scale, kRows, cols, fp32.data(), DType::kFloat32, kStride);
      for (int64_t r = 0; r < kRows; ++r)
        for (int64_t c = 0; c < kStride; ++c) {
          const size_t at = static_cast<size_t>(r * kStride + c);
          const float want = x[static_cast<size_t>(r * kLd + (c < cols ? c : 0))] * (scale ? scale[r] : 1.0f);
          ASSERT_EQ(bf16[at], c < cols ? float_to_bfloat16(want) : 0xabcd) << r << ", " << c;
          ASSERT_EQ(fp16[at], c < cols ? float_to_float16(want) : 0xabcd) << r << ", " << c;
          ASSERT_TRUE(same(fp32[at], c < cols ? want : -7.0f)) << r << ", " << c;
        }
    }
}

TEST_P(TileOpsTest, Transpose) {
  constexpr int64_t kLd = 80, kDstLd = 144;
  const std::vector<float> x = Random(5).normals(130 * kLd);
  for (int64_t rows : {16, 48, 128})
    for (int64_t cols : {16, 64}) {
      std::vector<float> y(static_cast<size_t>(cols * kDstLd), kNaN);
      ops.transpose(x.data(), kLd, rows, cols, y.data(), kDstLd);
      for (int64_t c = 0; c < cols; ++c)
        for (int64_t r = 0; r < kDstLd; ++r) {
          const float want = r < rows ? x[static_cast<size_t>(r * kLd + c)] : kNaN;
          ASSERT_TRUE(same(y[static_cast<size_t>(c * kDstLd + r)], want)) << r << ", " << c;
        }
    }
}

TEST_P(TileOpsTest, RowDot) {
  constexpr int64_t kRows = 5, kLd = 272;
  const std::vector<float> a = Random(6).normals(kRows * kLd), b = Random(7).normals(kRows * kLd);
  for (int64_t cols : {16, 48, 64, 128, 256}) {
    float dot[kRows];
    ops.row_dot(a.data(), b.data(), kLd, kRows, cols, dot);
    for (int64_t r = 0; r < kRows; ++r) {
      double sum = 0, size = 0;
      for (int64_t c = 0; c < cols; ++c) {
        const double term =
            double{a[static_cast<size_t>(r * kLd + c)]} * double{b[static_cast<size_t>(r * kLd + c)]};
        sum += term, size += std::fabs(term);
      }
      ASSERT_NEAR(dot[r], sum, static_cast<double>(cols) * 0x1p-24 * size);
    }
  }
}

}  // namespace
}  // namespace attn_qat::cpu
