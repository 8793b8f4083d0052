#include "checks.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace attn_qat::torch_glue {

namespace {

template <class Sizes>
std::string list_text(const Sizes& sizes) {
  std::ostringstream text;
  text << "(";
  for (size_t i = 0; i < sizes.size(); ++i) text << (i ? ", " : "") << sizes[i];
  text << (sizes.size() == 1 ? ",)" : ")");
  return text.str();
}

}  // namespace

std::string shape_text(const Tensor& t) { return list_text(t.sizes()); }

std::string device_text(const Tensor& t) {
  if (t.is_cpu()) return "cpu";
  return (t.is_cuda() ? "cuda:" : "device ") + std::to_string(t.get_device_index());
}

const char* dtype_text(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Half: return "float16";
    case ScalarType::Float: return "float32";
    case ScalarType::Double: return "float64";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    case ScalarType::Byte: return "uint8";
    case ScalarType::Bool: return "bool";
    case ScalarType::Float8_e4m3fn: return "float8_e4m3fn";
    default: return "another dtype";
  }
}

DType check_dtype(const Argument& a) {
  switch (a.tensor.scalar_type()) {
    case ScalarType::BFloat16: return DType::kBFloat16;
    case ScalarType::Half: return DType::kFloat16;
    case ScalarType::Float: return DType::kFloat32;
    default:
      refuse(a.op, ": ", a.name, " has dtype ", dtype_text(a.tensor.scalar_type()),
             ", takes bfloat16, float16 or float32");
  }
}

void check_dtype_is(const Argument& a, ScalarType dtype) {
  ATTN_QAT_CHECK(a.tensor.scalar_type() == dtype, a.op, ": ", a.name, " has dtype ",
                 dtype_text(a.tensor.scalar_type()), ", takes ", dtype_text(dtype));
}

void check_same_dtype(const Argument& a, const Argument& as) {
  ATTN_QAT_CHECK(a.tensor.scalar_type() == as.tensor.scalar_type(), a.op, ": ", a.name, " has dtype ",
                 dtype_text(a.tensor.scalar_type()), ", takes ", dtype_text(as.tensor.scalar_type()),
                 ", that of ", as.name);
}

void check_same_device(const Argument& a, const Argument& as) {
  ATTN_QAT_CHECK(a.tensor.device() == as.tensor.device(), a.op, ": ", a.name, " is on ",
                 device_text(a.tensor), ", takes ", device_text(as.tensor), ", where ", as.name, " is");
}

void check_shape(const Argument& a, const std::vector<int64_t>& shape) {
  const auto sizes = a.tensor.sizes();
  bool same = sizes.size() == shape.size();
  for (size_t i = 0; same && i < shape.size(); ++i) same = sizes[i] == shape[i];
  ATTN_QAT_CHECK(same, a.op, ": ", a.name, " has shape ", shape_text(a.tensor), ", takes ", list_text(shape));
}

void check_contiguous(const Argument& a) {
  ATTN_QAT_CHECK(a.tensor.is_contiguous(), a.op, ": ", a.name, " has strides ", list_text(a.tensor.strides()),
                 ", takes a contiguous tensor");
}

void check_rows(const Argument& a) {
  const Tensor& t = a.tensor;
  if (t.numel() == 0) return;
  constexpr int64_t kAlignment = 16;
  const int64_t bytes = static_cast<int64_t>(t.element_size());
  ATTN_QAT_CHECK(t.stride(3) == 1, a.op, ": ", a.name, " has stride ", t.stride(3),
                 " along the head dimension, takes 1");
  for (int64_t i = 0; i < 3; ++i)
    ATTN_QAT_CHECK(t.size(i) == 1 || t.stride(i) * bytes % kAlignment == 0, a.op, ": ", a.name,
                   " has strides ", list_text(t.strides()),
                   ", takes rows that start at multiples of 16 bytes");
  ATTN_QAT_CHECK(reinterpret_cast<uintptr_t>(t.const_data_ptr()) % kAlignment == 0, a.op, ": ", a.name,
                 " starts at an address that is no multiple of 16 bytes, takes one that is");
}

void check_no_overlap(const Argument& a) {
  const Tensor& t = a.tensor;
  if (t.numel() == 0) return;
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (int64_t i = 0; i < t.dim(); ++i)
    if (t.size(i) > 1) dims.emplace_back(t.stride(i), t.size(i));
  std::sort(dims.begin(), dims.end());
  int64_t span = 1;  // elements from the first to the last of the dimensions so far
  for (const auto& [stride, size] : dims) {
    ATTN_QAT_CHECK(stride >= span, a.op, ": ", a.name, " has shape ", shape_text(t), " and strides ",
                   list_text(t.strides()), ", takes elements that share no memory: it is written");
    span += stride * (size - 1);
  }
}

Recipe check_recipe(const char* op, const std::string& recipe) {
  if (recipe == "cudnn") return Recipe::kCudnn;
  if (recipe == "fp4") return Recipe::kFp4;
  if (recipe == "fp4_qk") return Recipe::kFp4Qk;
  refuse(op, ": recipe is '", recipe, "', takes 'cudnn', 'fp4' or 'fp4_qk'");
}

Recipe check_inference_recipe(const char* op, const std::string& recipe) {
  if (recipe == "fp4") return Recipe::kFp4;
  if (recipe == "fp4_qk") return Recipe::kFp4Qk;
  refuse(op, ": recipe is '", recipe, "', takes 'fp4' or 'fp4_qk'",
         recipe == "cudnn"
             ? " (cudnn quantises V along the head dimension, which no FP4 tensor core multiplies)"
             : "");
}

void check_softmax_scale(const char* op, double softmax_scale) {
  const float used = static_cast<float>(softmax_scale);
  ATTN_QAT_CHECK(std::isfinite(used) && used > 0.0f, op, ": softmax_scale is ", softmax_scale,
                 ", takes a finite positive number");
}

AttentionShape check_attention(const char* op, const Tensor& q, const Tensor& k, const Tensor& v) {
  const Argument query{op, "q", q};
  for (const Argument& a : {query, Argument{op, "k", k}, Argument{op, "v", v}}) {
    ATTN_QAT_CHECK(a.tensor.dim() == 4, op, ": ", a.name, " has ", a.tensor.dim(),
                   " dimensions, takes 4: ", "(batch, heads, sequence, head_dim)");
    check_dtype(a);
    check_same_dtype(a, query);
    check_same_device(a, query);
  }
  const int64_t head_dim = q.size(3);
  ATTN_QAT_CHECK(head_dim > 0 && head_dim % 16 == 0 && head_dim <= kMaxHeadDim, op, ": q has head_dim ",
                 head_dim, ", takes a multiple of 16 up to ", kMaxHeadDim);
  const int64_t heads_q = q.size(1), heads_kv = k.size(1);
  check_shape({op, "k", k}, {q.size(0), heads_kv, k.size(2), head_dim});
  check_shape({op, "v", v}, {q.size(0), heads_kv, k.size(2), head_dim});
  ATTN_QAT_CHECK(heads_kv > 0 ? heads_q % heads_kv == 0 : heads_q == 0, op, ": k has ", heads_kv,
                 " heads and q ", heads_q, ", takes a number of kv heads that divides the query heads");
  for (const Argument& a : {query, Argument{op, "k", k}, Argument{op, "v", v}}) check_rows(a);
  return {q.size(0), heads_q, heads_kv, q.size(2), k.size(2), head_dim};
}

View view_of(const Tensor& t) { return {t.data_ptr(), t.stride(0), t.stride(1), t.stride(2)}; }

}  // namespace attn_qat::torch_glue
