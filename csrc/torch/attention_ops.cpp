// forward, infer, preprocess, the backward halves, backward and its allocation-free form (contract sections
// 3 to 5).
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "dispatch.h"

namespace attn_qat::torch_glue {
namespace {

constexpr int64_t kWorkspaceAlignment = 64;

std::vector<int64_t> row_shape(const AttentionShape& s) { return {s.batch, s.heads_q, s.seq_q}; }

// A float32 or int32 value for each query row.
void check_row_values(const Argument& a, const Argument& q, ScalarType dtype, const AttentionShape& s) {
  check_dtype_is(a, dtype);
  check_same_device(a, q);
  check_shape(a, row_shape(s));
  check_contiguous(a);
}

// A tensor of q's shape, dtype and device.
void check_like_q(const Argument& a, const Argument& q) {
  check_same_dtype(a, q);
  check_same_device(a, q);
  check_shape(a, {q.tensor.sizes().begin(), q.tensor.sizes().end()});
  check_rows(a);
}

// Everything but the outputs.
ForwardParams check_forward(const char* op, const Tensor& q, const Tensor& k, const Tensor& v, Recipe recipe,
                            double softmax_scale, bool is_causal) {
  ForwardParams p{};
  p.shape = check_attention(op, q, k, v);
  p.dtype = check_dtype({op, "q", q});
  p.recipe = recipe;
  check_softmax_scale(op, softmax_scale);
  p.softmax_scale = static_cast<float>(softmax_scale);
  p.causal = is_causal;
  p.q = view_of(q), p.k = view_of(k), p.v = view_of(v);
  return p;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                                   double softmax_scale, bool is_causal, std::string recipe,
                                                   bool /* deterministic: of the gradient */) {
  constexpr auto op = "forward";
  ForwardParams p = check_forward(op, q, k, v, check_recipe(op, recipe), softmax_scale, is_causal);
  Tensor out = torch::stable::new_empty(q, q.sizes());
  Tensor high_precision_out = torch::stable::new_empty(q, q.sizes());
  Tensor lse = torch::stable::new_empty(q, row_shape(p.shape), ScalarType::Float);
  Tensor row_exponent = torch::stable::new_empty(q, row_shape(p.shape), ScalarType::Int);
  p.out = view_of(out), p.high_precision_out = view_of(high_precision_out);
  p.lse = static_cast<float*>(lse.mutable_data_ptr());
  p.row_exponent = static_cast<int32_t*>(row_exponent.mutable_data_ptr());
  launch_forward(op, p, q);
  return {out, high_precision_out, lse, row_exponent};
}

Tensor infer(const Tensor& q, const Tensor& k, const Tensor& v, double softmax_scale, bool is_causal,
             std::string recipe) {
  constexpr auto op = "infer";
  ForwardParams p = check_forward(op, q, k, v, check_inference_recipe(op, recipe), softmax_scale, is_causal);
  Tensor out = torch::stable::new_empty(q, q.sizes());
  p.out = view_of(out);
  launch_forward(op, p, q);
  return out;
}

std::tuple<Tensor, Tensor> infer_with_lse(const Tensor& q, const Tensor& k, const Tensor& v,
                                          double softmax_scale, bool is_causal, std::string recipe) {
  constexpr auto op = "infer_with_lse";
  ForwardParams p = check_forward(op, q, k, v, check_inference_recipe(op, recipe), softmax_scale, is_causal);
  Tensor out = torch::stable::new_empty(q, q.sizes());
  Tensor lse = torch::stable::new_empty(q, row_shape(p.shape), ScalarType::Float);
  p.out = view_of(out);
  p.lse = static_cast<float*>(lse.mutable_data_ptr());
  launch_forward(op, p, q);
  return {out, lse};
}

Tensor preprocess(const Tensor& high_precision_out, const Tensor& grad_out) {
  constexpr auto op = "preprocess";
  const Argument out{op, "high_precision_out", high_precision_out}, grad{op, "grad_out", grad_out};
  ATTN_QAT_CHECK(high_precision_out.dim() == 4, op, ": high_precision_out has ", high_precision_out.dim(),
                 " dimensions, takes 4: (batch, heads, sequence, head_dim)");
  PreprocessParams p{};
  p.dtype = check_dtype(out);
  check_like_q(grad, out);
  check_rows(out);
  p.batch = high_precision_out.size(0), p.heads = high_precision_out.size(1),
  p.seq = high_precision_out.size(2);
  p.head_dim = high_precision_out.size(3);
  ATTN_QAT_CHECK(p.head_dim > 0 && p.head_dim % 16 == 0 && p.head_dim <= kMaxHeadDim, op,
                 ": high_precision_out has head_dim ", p.head_dim, ", takes a multiple of 16 up to ",
                 kMaxHeadDim);
  Tensor delta = torch::stable::new_empty(grad_out, {p.batch, p.heads, p.seq}, ScalarType::Float);
  p.high_precision_out = view_of(high_precision_out), p.grad_out = view_of(grad_out);
  p.delta = static_cast<float*>(delta.mutable_data_ptr());
  launch_preprocess(p, grad_out);
  return delta;
}

// What every form of the backward is given.
struct BackwardInputs {
  const Tensor &grad_out, &q, &k, &v, &lse;
  double softmax_scale;
  bool is_causal;
  const std::string& recipe;
  const std::optional<Tensor>& row_exponent;
};

BackwardParams check_backward(const char* op, const BackwardInputs& in) {
  BackwardParams p{};
  p.shape = check_attention(op, in.q, in.k, in.v);
  p.dtype = check_dtype({op, "q", in.q});
  const Argument q{op, "q", in.q};
  check_like_q({op, "grad_out", in.grad_out}, q);
  check_row_values({op, "lse", in.lse}, q, ScalarType::Float, p.shape);
  if (in.row_exponent) {
    check_row_values({op, "row_exponent", *in.row_exponent}, q, ScalarType::Int, p.shape);
    p.row_exponent = static_cast<const int32_t*>(in.row_exponent->const_data_ptr());
  }
  p.recipe = check_recipe(op, in.recipe);
  check_softmax_scale(op, in.softmax_scale);
  p.softmax_scale = static_cast<float>(in.softmax_scale);
  p.causal = in.is_causal;
  p.deterministic = true;
  p.grad_out = view_of(in.grad_out), p.q = view_of(in.q), p.k = view_of(in.k), p.v = view_of(in.v);
  p.lse = static_cast<const float*>(in.lse.const_data_ptr());
  return p;
}

void set_delta(const char* op, BackwardParams& p, const Tensor& q, const Tensor& delta) {
  check_row_values({op, "delta", delta}, {op, "q", q}, ScalarType::Float, p.shape);
  p.delta = static_cast<const float*>(delta.const_data_ptr());
}

void set_high_precision_out(const char* op, BackwardParams& p, const Tensor& q,
                            const Tensor& high_precision_out) {
  check_like_q({op, "high_precision_out", high_precision_out}, {op, "q", q});
  p.high_precision_out = view_of(high_precision_out);
}

Tensor backward_dq(const Tensor& grad_out, const Tensor& q, const Tensor& k, const Tensor& v,
                   const Tensor& lse, const Tensor& delta, double softmax_scale, bool is_causal,
                   std::string recipe, std::optional<Tensor> row_exponent) {
  constexpr auto op = "backward_dq";
  BackwardParams p =
      check_backward(op, {grad_out, q, k, v, lse, softmax_scale, is_causal, recipe, row_exponent});
  set_delta(op, p, q, delta);
  Tensor dq = torch::stable::new_empty(q, q.sizes());
  p.dq = view_of(dq);
  launch_backward(p, q);
  return dq;
}

std::tuple<Tensor, Tensor> backward_dkdv(const Tensor& grad_out, const Tensor& q, const Tensor& k,
                                         const Tensor& v, const Tensor& lse, const Tensor& delta,
                                         double softmax_scale, bool is_causal, std::string recipe,
                                         std::optional<Tensor> row_exponent) {
  constexpr auto op = "backward_dkdv";
  BackwardParams p =
      check_backward(op, {grad_out, q, k, v, lse, softmax_scale, is_causal, recipe, row_exponent});
  set_delta(op, p, q, delta);
  Tensor dk = torch::stable::new_empty(k, k.sizes()), dv = torch::stable::new_empty(v, v.sizes());
  p.dk = view_of(dk), p.dv = view_of(dv);
  launch_backward(p, q);
  return {dk, dv};
}

std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& grad_out, const Tensor& q, const Tensor& k,
                                            const Tensor& v, const Tensor& high_precision_out,
                                            const Tensor& lse, double softmax_scale, bool is_causal,
                                            std::string recipe, std::optional<Tensor> row_exponent,
                                            bool deterministic) {
  constexpr auto op = "backward";
  BackwardParams p =
      check_backward(op, {grad_out, q, k, v, lse, softmax_scale, is_causal, recipe, row_exponent});
  set_high_precision_out(op, p, q, high_precision_out);
  Tensor dq = torch::stable::new_empty(q, q.sizes());
  Tensor dk = torch::stable::new_empty(k, k.sizes()), dv = torch::stable::new_empty(v, v.sizes());
  p.dq = view_of(dq), p.dk = view_of(dk), p.dv = view_of(dv);
  p.deterministic = deterministic;
  launch_backward(p, q);
  return {dq, dk, dv};
}

void check_output(const Argument& out, const Argument& like) {
  check_same_dtype(out, like);
  check_same_device(out, like);
  check_shape(out, {like.tensor.sizes().begin(), like.tensor.sizes().end()});
  check_rows(out);
  check_no_overlap(out);
}

void backward_out(const Tensor& grad_out, const Tensor& q, const Tensor& k, const Tensor& v,
                  const Tensor& high_precision_out, const Tensor& lse, double softmax_scale, bool is_causal,
                  std::string recipe, std::optional<Tensor> row_exponent, const Tensor& workspace, Tensor dq,
                  Tensor dk, Tensor dv, bool deterministic) {
  constexpr auto op = "backward.out";
  BackwardParams p =
      check_backward(op, {grad_out, q, k, v, lse, softmax_scale, is_causal, recipe, row_exponent});
  set_high_precision_out(op, p, q, high_precision_out);
  check_output({op, "dq", dq}, {op, "q", q});
  check_output({op, "dk", dk}, {op, "k", k});
  check_output({op, "dv", dv}, {op, "v", v});
  const Argument written[] = {{op, "dq", dq}, {op, "dk", dk}, {op, "dv", dv}, {op, "workspace", workspace}};
  for (const Argument& a : written)
    for (const Argument& other : written)
      ATTN_QAT_CHECK(&a == &other || a.tensor.numel() == 0 || other.tensor.numel() == 0 ||
                         a.tensor.const_data_ptr() != other.tensor.const_data_ptr(),
                     op, ": ", a.name, " starts where ", other.name,
                     " does, takes memory of its own: it is written");
  const Argument& space = written[3];
  check_dtype_is(space, ScalarType::Byte);
  check_same_device(space, {op, "q", q});
  check_contiguous(space);
  const int64_t wanted = static_cast<int64_t>(backward_workspace_bytes(p.shape, q));
  ATTN_QAT_CHECK(workspace.dim() == 1 && workspace.numel() >= wanted, op, ": workspace has shape ",
                 shape_text(workspace), ", takes one dimension of at least ", wanted, " bytes");
  ATTN_QAT_CHECK(
      wanted == 0 || reinterpret_cast<uintptr_t>(workspace.const_data_ptr()) % kWorkspaceAlignment == 0, op,
      ": workspace starts at an address that is no multiple of ", kWorkspaceAlignment,
      " bytes, takes one that is");
  p.dq = view_of(dq), p.dk = view_of(dk), p.dv = view_of(dv);
  p.deterministic = deterministic;
  launch_backward(p, workspace.data_ptr(), q);
}

int64_t workspace_bytes_op(const Tensor& q, const Tensor& k) {
  return static_cast<int64_t>(
      backward_workspace_bytes(check_attention("backward_workspace_bytes", q, k, k), q));
}

template <class Params>
std::string explain_op(Params p, const Tensor& q, const Tensor& k, const Tensor& v, bool is_causal,
                       const std::string& recipe) {
  constexpr auto op = "explain";
  p.shape = check_attention(op, q, k, v);
  p.dtype = check_dtype({op, "q", q});
  p.recipe = check_recipe(op, recipe);
  p.q = view_of(q), p.k = view_of(k), p.v = view_of(v);
  p.causal = is_causal;
  return explain(p, q);
}

std::string explain_by_name(std::string name, const Tensor& q, const Tensor& k, const Tensor& v,
                            bool is_causal, std::string recipe) {
  if (name == "forward") return explain_op(ForwardParams{}, q, k, v, is_causal, recipe);
  ATTN_QAT_CHECK(name == "backward", "explain: op is '", name, "', takes 'forward' or 'backward'");
  return explain_op(BackwardParams{}, q, k, v, is_causal, recipe);
}

template <class Library>
void implement(Library& m) {
  m.impl("forward", TORCH_BOX(&forward));
  m.impl("infer", TORCH_BOX(&infer));
  m.impl("infer_with_lse", TORCH_BOX(&infer_with_lse));
  m.impl("preprocess", TORCH_BOX(&preprocess));
  m.impl("backward_dq", TORCH_BOX(&backward_dq));
  m.impl("backward_dkdv", TORCH_BOX(&backward_dkdv));
  m.impl("backward", TORCH_BOX(&backward));
  m.impl("backward.out", TORCH_BOX(&backward_out));
  m.impl("explain", TORCH_BOX(&explain_by_name));
  m.impl("backward_workspace_bytes", TORCH_BOX(&workspace_bytes_op));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(attn_qat, m) {
  m.def(
      "forward(Tensor q, Tensor k, Tensor v, float softmax_scale, bool is_causal, str recipe=\"cudnn\", "
      "bool deterministic=True) -> (Tensor out, Tensor high_precision_out, Tensor lse, Tensor row_exponent)");
  m.def(
      "infer(Tensor q, Tensor k, Tensor v, float softmax_scale, bool is_causal, str recipe=\"fp4\") -> "
      "Tensor");
  m.def(
      "infer_with_lse(Tensor q, Tensor k, Tensor v, float softmax_scale, bool is_causal, str recipe=\"fp4\") "
      "-> (Tensor out, Tensor lse)");
  m.def("preprocess(Tensor high_precision_out, Tensor grad_out) -> Tensor");
  m.def(
      "backward_dq(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor lse, Tensor delta, float "
      "softmax_scale, "
      "bool is_causal, str recipe=\"cudnn\", Tensor? row_exponent=None) -> Tensor");
  m.def(
      "backward_dkdv(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor lse, Tensor delta, float "
      "softmax_scale, "
      "bool is_causal, str recipe=\"cudnn\", Tensor? row_exponent=None) -> (Tensor dk, Tensor dv)");
  m.def(
      "backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor high_precision_out, Tensor lse, "
      "float softmax_scale, bool is_causal, str recipe=\"cudnn\", Tensor? row_exponent=None, "
      "bool deterministic=True) -> (Tensor dq, Tensor dk, Tensor dv)");
  m.def(
      "backward.out(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor high_precision_out, Tensor lse, "
      "float softmax_scale, bool is_causal, str recipe, Tensor? row_exponent, Tensor(d!) workspace, *, "
      "Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, bool deterministic=True) -> ()");
  m.def("explain(str op, Tensor q, Tensor k, Tensor v, bool is_causal=False, str recipe=\"cudnn\") -> str");
  m.def("backward_workspace_bytes(Tensor q, Tensor k) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(attn_qat, CPU, m) { implement(m); }

#if ATTN_QAT_CUDA
STABLE_TORCH_LIBRARY_IMPL(attn_qat, CUDA, m) { implement(m); }
#endif

}  // namespace attn_qat::torch_glue
