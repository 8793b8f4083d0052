// Fake quantisation of tiles, every instruction set: bit for bit the scalar definitions of format/nvfp4.h.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>

#include "format/nvfp4.h"
#include "tile_testing.h"

namespace attn_qat::cpu {
namespace {

using attn_qat::testing::kInf;
using attn_qat::testing::kNaN;
using attn_qat::testing::Random;
using Block = std::array<float, nvfp4::kBlock>;

Block quantized(const Block& x) {
  uint32_t amax = 0;
  for (float value : x) amax = std::max(amax, nvfp4::magnitude_bits(value));
  const float scale = nvfp4::block_scale(amax);
  Block y;
  for (size_t i = 0; i < y.size(); ++i) y[i] = nvfp4::fake_quantize(x[i], scale);
  return y;
}

// Blocks around every decision: each scale with its midpoints and their neighbours, zeros, saturation, NaN,
// Inf, and magnitudes from subnormal to the largest.
std::vector<Block> blocks() {
  std::vector<Block> all;
  for (int byte = 1; byte <= 0x7e; ++byte) {
    const float scale = nvfp4::e4m3_decode(static_cast<uint8_t>(byte));
    Block at = {6 * scale}, over = at, under = at;
    const float midpoints[] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};
    for (size_t i = 0; i < 14; ++i) {
      const float x = (i < 7 ? 1.0f : -1.0f) * scale * midpoints[i % 7];
      at[i + 1] = x, over[i + 1] = std::nextafter(x, kInf), under[i + 1] = std::nextafter(x, -kInf);
    }
    all.insert(all.end(), {at, over, under});
  }
  Random random(1);
  for (float size : {1e-42f, 1e-30f, 1e-4f, 1e-2f, 1.0f, 300.0f, 5e3f, 1e37f})
    for (int i = 0; i < 16; ++i) {
      Block x;
      for (float& value : x) value = size * random.normal();
      all.push_back(x);
    }
  Block nan = all.back(), inf = all.back(), late = {};
  nan[0] = kNaN, inf[7] = -kInf, late[15] = kNaN;
  const Block negative_nan = {-kNaN, 1.0f}, signaling = {bits_float(0x7f800001u), 1.0f}, zero = {},
              minus = {-0.0f};
  all.insert(all.end(), {nan, inf, late, negative_nan, signaling, zero, minus, {3e38f, 1000.0f, 200.0f}});
  while (all.size() % 8 != 0) all.push_back(zero);
  return all;
}

class TileQuantize : public TileTest {};

INSTANTIATE_TEST_SUITE_P(Isa, TileQuantize, ::testing::ValuesIn(all_sets()), set_name);

void expect_same_value(float got, float want, size_t block, size_t i) {
  if (std::isnan(want))
    ASSERT_TRUE(std::isnan(got)) << "block " << block << " value " << i << ": " << got;
  else
    ASSERT_EQ(got, want) << "block " << block << " value " << i;
}

TEST_P(TileQuantize, RowsHoldBlocksSideBySide) {
  constexpr size_t kPerRow = 8, kLd = kPerRow * nvfp4::kBlock + 5;
  const std::vector<Block> all = blocks();
  const size_t rows = all.size() / kPerRow;
  std::vector<float> tile(rows * kLd, 123.0f);
  const auto place = [&](size_t b, size_t i) { return b / kPerRow * kLd + b % kPerRow * nvfp4::kBlock + i; };
  for (size_t b = 0; b < all.size(); ++b)
    for (size_t i = 0; i < nvfp4::kBlock; ++i) tile[place(b, i)] = all[b][i];
  ops.fake_quantize_rows(tile.data(), kLd, static_cast<int64_t>(rows), kPerRow * nvfp4::kBlock);
  for (size_t b = 0; b < all.size(); ++b) {
    const Block want = quantized(all[b]);
    for (size_t i = 0; i < nvfp4::kBlock; ++i)
      ASSERT_NO_FATAL_FAILURE(expect_same_value(tile[place(b, i)], want[i], b, i));
  }
  for (size_t r = 0; r < rows; ++r)
    for (size_t c = kPerRow * nvfp4::kBlock; c < kLd; ++c) ASSERT_EQ(tile[r * kLd + c], 123.0f);
}

TEST_P(TileQuantize, RowsOfAnyNumberOfBlocks) {
  Random random(2);
  for (int64_t count : {1, 2, 15, 16, 17, 33}) {
    std::vector<float> row = random.normals(count * nvfp4::kBlock), want;
    for (int64_t b = 0; b < count; ++b) {
      Block x;
      std::copy_n(row.begin() + b * nvfp4::kBlock, nvfp4::kBlock, x.begin());
      const Block y = quantized(x);
      want.insert(want.end(), y.begin(), y.end());
    }
    ops.fake_quantize_rows(row.data(), count * nvfp4::kBlock, 1, count * nvfp4::kBlock);
    ASSERT_EQ(row, want) << count << " blocks";
  }
}

TEST_P(TileQuantize, ColumnsHoldBlocksDownwards) {
  constexpr size_t kColumns = 64, kLd = kColumns + 16;
  std::vector<Block> all = blocks();
  all.resize((all.size() + kColumns - 1) / kColumns * kColumns);
  const size_t rows = all.size() / kColumns * nvfp4::kBlock;
  std::vector<float> tile(rows * kLd, 123.0f);
  const auto place = [&](size_t b, size_t i) {
    return (b / kColumns * nvfp4::kBlock + i) * kLd + b % kColumns;
  };
  for (size_t b = 0; b < all.size(); ++b)
    for (size_t i = 0; i < nvfp4::kBlock; ++i) tile[place(b, i)] = all[b][i];
  ops.fake_quantize_columns(tile.data(), kLd, static_cast<int64_t>(rows), kColumns);
  for (size_t b = 0; b < all.size(); ++b) {
    const Block want = quantized(all[b]);
    for (size_t i = 0; i < nvfp4::kBlock; ++i)
      ASSERT_NO_FATAL_FAILURE(expect_same_value(tile[place(b, i)], want[i], b, i));
  }
  for (size_t r = 0; r < rows; ++r)
    for (size_t c = kColumns; c < kLd; ++c) ASSERT_EQ(tile[r * kLd + c], 123.0f);
}

}  // namespace
}  // namespace attn_qat::cpu
