// fake_quantize, quantize, dequantize and preprocess of the CPU on whole tensors: both axes, tails, strides,
// dtypes, scale layouts, global scale. Expected values are built block by block from format/nvfp4.h.
#include <gtest/gtest.h>

#include <algorithm>

#include "cpu_testing.h"
#include "format/nvfp4.h"

namespace attn_qat::cpu {
namespace {

using attn_qat::testing::kNaN;
using attn_qat::testing::Operand;
using attn_qat::testing::Random;
using attn_qat::testing::read_value;
using attn_qat::testing::thread_executor;

constexpr DType kDTypes[] = {DType::kBFloat16, DType::kFloat16, DType::kFloat32};
constexpr int64_t kOuter0 = 2, kOuter1 = 3;

int64_t up(int64_t a, int64_t b) { return (a + b - 1) / b * b; }

struct Size {
  int64_t rows, cols;
};
// Below, at and above a block in both directions; more than one task of columns.
constexpr Size kSizes[] = {{1, 2}, {16, 16}, {17, 33}, {2, 5000}, {130, 64}, {34, 72}};

// One (2, 3, rows, cols) tensor and what quantising it along an axis must give.
struct Case {
  Size size;
  bool along_rows;
  DType dtype;
  float global_scale;  // 0: none
  Operand x;
  std::vector<float> values;

  Case(Size s, bool rows, DType d, float g)
      : size(s), along_rows(rows), dtype(d), global_scale(g), x(d, kOuter0, kOuter1, s.rows, s.cols) {
    values = Random(11).normals(x.count());
    for (size_t i = 0; i < values.size(); i += 97) values[i] *= 1000;
    values.front() = 0, values.back() = kNaN;
    x.set(values);
    values = x.values();
  }

  int64_t lines() const { return along_rows ? size.cols : size.rows; }
  int64_t length() const { return along_rows ? size.rows : size.cols; }
  int64_t blocks() const { return up(length(), nvfp4::kBlock) / nvfp4::kBlock; }
  // Index into values of element i of a line.
  size_t at(int64_t outer, int64_t line, int64_t i) const {
    const int64_t row = along_rows ? i : line, col = along_rows ? line : i;
    return static_cast<size_t>((outer * size.rows + row) * size.cols + col);
  }
  float local(size_t i) const { return global_scale == 0 ? values[i] : values[i] / global_scale; }
  float scale(int64_t outer, int64_t line, int64_t block) const {
    uint32_t amax = 0;
    for (int64_t i = block * nvfp4::kBlock; i < std::min(length(), (block + 1) * nvfp4::kBlock); ++i)
      amax = std::max(amax, nvfp4::magnitude_bits(local(at(outer, line, i))));
    return nvfp4::block_scale(amax);
  }
  QuantizeParams params(void* out, uint8_t* data, uint8_t* scales, bool tiled) {
    return {x.view(), out,     data,      scales,    global_scale == 0 ? nullptr : &global_scale,
            kOuter0,  kOuter1, size.rows, size.cols, along_rows,
            tiled,    dtype};
  }
};

template <class Body>
void for_each_case(Body body) {
  for (Size size : kSizes)
    for (bool along_rows : {false, true})
      for (DType dtype : kDTypes)
        for (float global_scale : {0.0f, 0.037f}) {
          SCOPED_TRACE(::testing::Message() << size.rows << "x" << size.cols << " along_rows " << along_rows
                                            << " dtype " << static_cast<int>(dtype) << " g " << global_scale);
          Case c(size, along_rows, dtype, global_scale);
          body(c);
        }
}

bool same(float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); }

float rounded(float x, DType dtype) {
  if (dtype == DType::kFloat32) return x;
  return dtype == DType::kBFloat16 ? round_to_bfloat16(x) : float16_to_float(float_to_float16(x));
}

// The value of every element after quantisation.
template <class Check>
void for_each_value(const Case& c, Check check) {
  for (int64_t outer = 0; outer < kOuter0 * kOuter1; ++outer)
    for (int64_t line = 0; line < c.lines(); ++line)
      for (int64_t i = 0; i < c.length(); ++i) {
        const float scale = c.scale(outer, line, i / nvfp4::kBlock);
        const size_t at = c.at(outer, line, i);
        const float value = nvfp4::fake_quantize(c.local(at), scale);
        check(at, rounded(c.global_scale == 0 ? value : value * c.global_scale, c.dtype));
      }
}

TEST(CpuQuantize, FakeQuantizeIsContiguousAndExact) {
  for_each_case([](Case& c) {
    std::vector<uint8_t> out(c.values.size() * static_cast<size_t>(dtype_bytes(c.dtype)) + 64, 0xa5);
    fake_quantize(c.params(out.data(), nullptr, nullptr, false), thread_executor<3>());
    for_each_value(c, [&](size_t i, float want) {
      const float got = read_value(out.data(), c.dtype, static_cast<int64_t>(i));
      ASSERT_TRUE(same(got, want)) << "at " << i << ": got " << got << ", want " << want;
    });
    for (size_t i = out.size() - 64; i < out.size(); ++i) ASSERT_EQ(out[i], 0xa5);
  });
}

// Packed memory of one case; every byte starts as 0xcc.
struct Packed {
  int64_t scales_per_matrix;
  std::vector<uint8_t> data, scales;
  Packed(const Case& c, bool tiled)
      : scales_per_matrix(tiled ? up(c.lines(), 128) * up(c.blocks(), 4) : c.lines() * c.blocks()),
        data(static_cast<size_t>(kOuter0 * kOuter1 * c.lines() * (c.length() / 2)), 0xcc),
        scales(static_cast<size_t>(kOuter0 * kOuter1 * scales_per_matrix), 0xcc) {}
};

// The layout of one packed tensor: codes two a byte, even index low; scales linear or tiled.
void check_packed(const Case& c, const Packed& packed, bool tiled) {
  for (int64_t outer = 0; outer < kOuter0 * kOuter1; ++outer)
    for (int64_t line = 0; line < c.lines(); ++line)
      for (int64_t i = 0; i < c.length(); ++i) {
        const int64_t block = i / nvfp4::kBlock, tiles = up(c.blocks(), 4) / 4;
        const int64_t scale_at =
            tiled ? nvfp4::tiled_scale_offset(line, block, tiles) : line * c.blocks() + block;
        const float scale = c.scale(outer, line, block);
        ASSERT_EQ(packed.scales[static_cast<size_t>(outer * packed.scales_per_matrix + scale_at)],
                  nvfp4::e4m3_encode(scale))
            << "line " << line << " block " << block;
        const size_t byte = static_cast<size_t>(((outer * c.lines() + line) * c.length() + i) / 2);
        const int code = i % 2 == 0 ? packed.data[byte] & 15 : packed.data[byte] >> 4;
        ASSERT_EQ(code, nvfp4::e2m1_encode(c.local(c.at(outer, line, i)), scale))
            << "line " << line << " element " << i;
      }
}

TEST(CpuQuantize, PacksCodesAndScales) {
  for_each_case([](Case& c) {
    if (c.length() % 2 != 0) return;
    for (bool tiled : {false, true}) {
      Packed packed(c, tiled);
      quantize(c.params(nullptr, packed.data.data(), packed.scales.data(), tiled), thread_executor<2>());
      ASSERT_NO_FATAL_FAILURE(check_packed(c, packed, tiled));
    }
  });
}

TEST(CpuQuantize, DequantizeUndoesThePacking) {
  for_each_case([](Case& c) {
    if (c.length() % 2 != 0) return;
    for (bool tiled : {false, true}) {
      Packed packed(c, tiled);
      quantize(c.params(nullptr, packed.data.data(), packed.scales.data(), tiled), serial_executor());
      Operand y(c.dtype, kOuter0, kOuter1, c.size.rows, c.size.cols);
      QuantizeParams params = c.params(nullptr, packed.data.data(), packed.scales.data(), tiled);
      params.x = y.view();
      dequantize(params, thread_executor<3>());
      EXPECT_TRUE(y.gaps_are_intact());
      const std::vector<float> got = y.values();
      for_each_value(c, [&](size_t i, float want) {
        ASSERT_TRUE(same(got[i], want)) << "at " << i << ": got " << got[i] << ", want " << want;
      });
    }
  });
}

TEST(CpuPreprocess, DeltaIsTheRowSumOfTheProduct) {
  for (DType dtype : kDTypes)
    for (int64_t head_dim : {16, 64, 128, 256}) {
      constexpr int64_t kSeq = 35;
      Operand out(dtype, kOuter0, kOuter1, kSeq, head_dim), grad(dtype, kOuter0, kOuter1, kSeq, head_dim);
      out.set(Random(1).normals(out.count()));
      grad.set(Random(2).normals(grad.count()));
      std::vector<float> delta(kOuter0 * kOuter1 * kSeq + 1, 77.0f);
      preprocess({out.view(), grad.view(), delta.data(), kOuter0, kOuter1, kSeq, head_dim, dtype},
                 thread_executor<3>());
      const std::vector<float> o = out.values(), g = grad.values();
      for (size_t row = 0; row + 1 < delta.size(); ++row) {
        double sum = 0, size = 0;
        for (size_t i = row * static_cast<size_t>(head_dim); i < (row + 1) * static_cast<size_t>(head_dim);
             ++i)
          sum += double{o[i]} * double{g[i]}, size += std::fabs(double{o[i]} * double{g[i]});
        ASSERT_NEAR(delta[row], sum, 1e-5 * size) << "row " << row;
      }
      EXPECT_EQ(delta.back(), 77.0f);
    }
}

}  // namespace
}  // namespace attn_qat::cpu
