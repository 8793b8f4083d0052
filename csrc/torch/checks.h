// Argument checks shared by every device. A failed check throws std::invalid_argument, ValueError in Python,
// before anything is allocated or launched; the text names the operator, the argument, what it got and what
// it takes.
#pragma once
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "params.h"

namespace attn_qat::torch_glue {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kMaxHeadDim = 256;

template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::invalid_argument(text.str());
}

#define ATTN_QAT_CHECK(condition, ...)                             \
  do {                                                             \
    if (!(condition)) ::attn_qat::torch_glue::refuse(__VA_ARGS__); \
  } while (0)

std::string shape_text(const Tensor&);
std::string device_text(const Tensor&);
const char* dtype_text(ScalarType);

// A named argument of the operator in work.
struct Argument {
  const char* op;
  const char* name;
  const Tensor& tensor;
};

DType check_dtype(const Argument&);  // bfloat16, float16 or float32
void check_dtype_is(const Argument&, ScalarType);
void check_same_dtype(const Argument&, const Argument& as);
void check_same_device(const Argument&, const Argument& as);
void check_shape(const Argument&, const std::vector<int64_t>& shape);  // exactly this shape
void check_contiguous(const Argument&);
// BHSD with the head dimension contiguous and rows 16-byte aligned.
void check_rows(const Argument&);
// Of what is written: no two elements in the same place.
void check_no_overlap(const Argument&);

Recipe check_recipe(const char* op, const std::string& recipe);
// One that FP4 tensor cores compute: not cudnn.
Recipe check_inference_recipe(const char* op, const std::string& recipe);
void check_softmax_scale(const char* op, double softmax_scale);
// q, k, v of one attention problem.
AttentionShape check_attention(const char* op, const Tensor& q, const Tensor& k, const Tensor& v);

View view_of(const Tensor&);  // of a BHSD tensor

}  // namespace attn_qat::torch_glue
