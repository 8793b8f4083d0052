// fake_quantize, quantize and dequantize (contract sections 1 and 5).
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "dispatch.h"
#include "format/nvfp4.h"

namespace attn_qat::torch_glue {
namespace {

using nvfp4::kBlock;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// True for axis -2, false for -1; anything else is refused.
bool along_rows(const char* op, int64_t axis, int64_t dims) {
  const int64_t from_end = axis >= 0 ? axis - dims : axis;
  ATTN_QAT_CHECK(axis >= -dims && axis < dims && (from_end == -1 || from_end == -2), op, ": axis is ", axis,
                 " for a tensor of ", dims, " dimensions, takes -1 or -2");
  return from_end == -2;
}

// Sizes and strides of a tensor of up to 4 dimensions as (outer0, outer1, rows, cols).
QuantizeParams pack(const char* op, const char* name, const Tensor& x, int64_t axis, DType dtype) {
  const int64_t dims = x.dim();
  ATTN_QAT_CHECK(dims >= 1 && dims <= 4, op, ": ", name, " has ", dims, " dimensions, takes 1 to 4");
  ATTN_QAT_CHECK(x.stride(dims - 1) == 1 || x.size(dims - 1) <= 1 || x.numel() == 0, op, ": ", name,
                 " has stride ", x.stride(dims - 1), " along its last dimension, takes 1");
  const auto size = [&](int64_t from_end) { return from_end <= dims ? x.size(dims - from_end) : 1; };
  const auto stride = [&](int64_t from_end) { return from_end <= dims ? x.stride(dims - from_end) : 0; };
  QuantizeParams p{};
  p.x = {x.data_ptr(), stride(4), stride(3), stride(2)};
  p.outer0 = size(4), p.outer1 = size(3), p.rows = size(2), p.cols = size(1);
  p.along_rows = along_rows(op, axis, dims);
  p.dtype = dtype;
  return p;
}

std::vector<int64_t> leading_sizes(const Tensor& x) {
  const auto sizes = x.sizes();
  return {sizes.begin(), sizes.begin() + (sizes.size() > 2 ? sizes.size() - 2 : 0)};
}

// Shape of packed data or scales: leading dimensions, lines, `length` along the quantised axis.
std::vector<int64_t> packed_shape(const Tensor& x, std::vector<int64_t> leading, int64_t lines,
                                  int64_t length) {
  if (x.dim() > 1) leading.push_back(lines);
  leading.push_back(length);
  return leading;
}

std::vector<int64_t> scales_shape(const Tensor& x, const std::vector<int64_t>& leading, int64_t lines,
                                  int64_t blocks, bool tiled) {
  if (!tiled) return packed_shape(x, leading, lines, blocks);
  auto shape = leading;
  shape.push_back(ceil_div(lines, 128) * 128);
  shape.push_back(ceil_div(blocks, 4) * 4);
  return shape;
}

Tensor fake_quantize(const Tensor& x, int64_t axis, const std::optional<Tensor>& global_scale) {
  constexpr auto op = "fake_quantize";
  QuantizeParams p = pack(op, "x", x, axis, check_dtype({op, "x", x}));
  p.global_scale = check_global_scale(op, global_scale, x);
  Tensor out = torch::stable::new_empty(x, x.sizes());
  p.out = out.mutable_data_ptr();
  if (x.numel() > 0) launch_fake_quantize(p, x);
  return out;
}

std::tuple<Tensor, Tensor> quantize(const Tensor& x, int64_t axis, const std::optional<Tensor>& global_scale,
                                    bool tiled_scales) {
  constexpr auto op = "quantize";
  QuantizeParams p = pack(op, "x", x, axis, check_dtype({op, "x", x}));
  const int64_t length = p.along_rows ? p.rows : p.cols, lines = p.along_rows ? p.cols : p.rows;
  ATTN_QAT_CHECK(length % 2 == 0, op, ": x has length ", length,
                 " along the quantised axis, takes an even one");
  p.global_scale = check_global_scale(op, global_scale, x);
  p.tiled_scales = tiled_scales;
  const auto leading = leading_sizes(x);
  Tensor data = torch::stable::new_empty(x, packed_shape(x, leading, lines, length / 2), ScalarType::Byte);
  // Zeros: the padding of a tile must not depend on what was in memory.
  const auto shape = scales_shape(x, leading, lines, ceil_div(length, kBlock), tiled_scales);
  Tensor scales = tiled_scales ? torch::stable::new_zeros(x, shape, ScalarType::Float8_e4m3fn)
                               : torch::stable::new_empty(x, shape, ScalarType::Float8_e4m3fn);
  p.data = static_cast<uint8_t*>(data.mutable_data_ptr());
  p.scales = static_cast<uint8_t*>(scales.mutable_data_ptr());
  if (x.numel() > 0) launch_quantize(p, x);
  return {data, scales};
}

Tensor dequantize(const Tensor& data, const Tensor& scales, ScalarType dtype, int64_t axis,
                  const std::optional<Tensor>& global_scale, bool tiled_scales) {
  constexpr auto op = "dequantize";
  const Argument data_argument{op, "data", data}, scales_argument{op, "scales", scales};
  check_dtype_is(data_argument, ScalarType::Byte);
  check_dtype_is(scales_argument, ScalarType::Float8_e4m3fn);
  check_same_device(scales_argument, data_argument);
  const int64_t dims = data.dim();
  ATTN_QAT_CHECK(dims >= 1 && dims <= 4, op, ": data has ", dims, " dimensions, takes 1 to 4");
  check_contiguous(data_argument);
  check_contiguous(scales_argument);
  const bool rows_axis = along_rows(op, axis, dims);
  const auto leading = leading_sizes(data);
  const int64_t length = data.size(dims - 1) * 2, lines = dims > 1 ? data.size(dims - 2) : 1;
  check_shape(scales_argument, scales_shape(data, leading, lines, ceil_div(length, kBlock), tiled_scales));
  const float* scale = check_global_scale(op, global_scale, data);
  auto shape = leading;
  if (dims > 1) shape.push_back(rows_axis ? length : lines);
  shape.push_back(rows_axis ? lines : length);
  ATTN_QAT_CHECK(dtype == ScalarType::BFloat16 || dtype == ScalarType::Half || dtype == ScalarType::Float, op,
                 ": dtype is ", dtype_text(dtype), ", takes bfloat16, float16 or float32");
  Tensor out = torch::stable::new_empty(data, shape, dtype);
  QuantizeParams p = pack(op, "the output", out, axis, check_dtype({op, "dtype", out}));
  p.data = static_cast<uint8_t*>(data.data_ptr());
  p.scales = static_cast<uint8_t*>(scales.data_ptr());
  p.global_scale = scale;
  p.tiled_scales = tiled_scales;
  if (out.numel() > 0) launch_dequantize(p, out);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(attn_qat, m) {
  m.def("fake_quantize(Tensor x, int axis=-1, Tensor? global_scale=None) -> Tensor");
  m.def(
      "quantize(Tensor x, int axis=-1, Tensor? global_scale=None, bool tiled_scales=False) "
      "-> (Tensor data, Tensor scales)");
  m.def(
      "dequantize(Tensor data, Tensor scales, ScalarType dtype, int axis=-1, Tensor? global_scale=None, "
      "bool tiled_scales=False) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(attn_qat, CPU, m) {
  m.impl("fake_quantize", TORCH_BOX(&fake_quantize));
  m.impl("quantize", TORCH_BOX(&quantize));
  m.impl("dequantize", TORCH_BOX(&dequantize));
}

#if ATTN_QAT_CUDA
STABLE_TORCH_LIBRARY_IMPL(attn_qat, CUDA, m) {
  m.impl("fake_quantize", TORCH_BOX(&fake_quantize));
  m.impl("quantize", TORCH_BOX(&quantize));
  m.impl("dequantize", TORCH_BOX(&dequantize));
}
#endif

}  // namespace attn_qat::torch_glue
