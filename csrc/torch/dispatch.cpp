#include "dispatch.h"

#include <torch/csrc/stable/ops.h>

#include <cmath>
#include <thread>

#include "cpu/cpu.h"
#include "cuda_dispatch.h"

namespace attn_qat::torch_glue {

// Upper bound of the workers that any call in this process uses: caller-owned workspaces are sized for it.
static int max_workers() {
  static const int workers = [] {
    const unsigned cores = std::thread::hardware_concurrency();
    return cores > 0 ? static_cast<int>(cores) : 1;
  }();
  return workers;
}

// Torch's own thread pool, at its current size.
static cpu::Executor torch_executor() {
  const int threads = static_cast<int>(torch::stable::get_num_threads());
  const int workers = threads < max_workers() ? threads : max_workers();
  return {workers > 0 ? workers : 1, [](int count, void (*body)(void*, int), void* context) {
            torch::stable::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
              for (int64_t worker = begin; worker < end; ++worker) body(context, static_cast<int>(worker));
            });
          }};
}

const float* check_global_scale(const char* op, const std::optional<Tensor>& global_scale,
                                const Tensor& like) {
  if (!global_scale) return nullptr;
  const Argument argument{op, "global_scale", *global_scale};
  check_dtype_is(argument, ScalarType::Float);
  check_same_device(argument, {op, "the input", like});
  ATTN_QAT_CHECK(global_scale->numel() == 1, op, ": global_scale has shape ", shape_text(*global_scale),
                 ", takes one element");
  const float* value = static_cast<const float*>(global_scale->const_data_ptr());
  if (global_scale->is_cpu())
    ATTN_QAT_CHECK(std::isfinite(*value) && *value > 0.0f, op, ": global_scale is ", *value,
                   ", takes a finite positive number");
  return value;
}

static Tensor new_workspace(const Tensor& on, size_t bytes) {
  return torch::stable::new_empty(on, {static_cast<int64_t>(bytes)}, ScalarType::Byte);
}

// Waking threads costs more than a small call does: below this many values, or multiplications, one is enough.
static cpu::Executor executor_for(int64_t work, int64_t small) {
  return work < small ? cpu::serial_executor() : torch_executor();
}

static cpu::Executor executor_for(const QuantizeParams& p) {
  return executor_for(p.outer0 * p.outer1 * p.rows * p.cols, int64_t{1} << 15);
}

static cpu::Executor executor_for(const AttentionShape& s) {
  return executor_for(s.batch * s.heads_q * s.seq_q * s.seq_k * s.head_dim, int64_t{1} << 18);
}

void launch_fake_quantize(const QuantizeParams& p, const Tensor& on) {
  if (on.is_cuda()) return cuda_fake_quantize(p, on);
  cpu::fake_quantize(p, executor_for(p));
}

void launch_quantize(const QuantizeParams& p, const Tensor& on) {
  if (on.is_cuda()) return cuda_quantize(p, on);
  cpu::quantize(p, executor_for(p));
}

void launch_dequantize(const QuantizeParams& p, const Tensor& on) {
  if (on.is_cuda()) return cuda_dequantize(p, on);
  cpu::dequantize(p, executor_for(p));
}

void launch_preprocess(const PreprocessParams& p, const Tensor& on) {
  if (on.is_cuda()) return cuda_preprocess(p, on);
  cpu::preprocess(p, executor_for(p.batch * p.heads * p.seq * p.head_dim, int64_t{1} << 15));
}

void launch_forward(const char* op, const ForwardParams& p, const Tensor& on) {
  if (on.is_cuda()) return cuda_forward(op, p, on);
  const cpu::Executor executor = executor_for(p.shape);
  Tensor workspace = new_workspace(on, cpu::forward_workspace_bytes(p.shape, executor.workers));
  cpu::forward(p, workspace.mutable_data_ptr(), executor);
}

void launch_backward(const BackwardParams& p, const Tensor& on) {
  if (on.is_cuda()) return cuda_backward(p, on);
  const cpu::Executor executor = executor_for(p.shape);
  Tensor workspace = new_workspace(on, cpu::backward_workspace_bytes(p.shape, executor.workers));
  cpu::backward(p, workspace.mutable_data_ptr(), executor);
}

void launch_backward(const BackwardParams& p, void* workspace, const Tensor& on) {
  if (on.is_cuda()) return cuda_backward(p, workspace, on);
  cpu::backward(p, workspace, executor_for(p.shape));
}

size_t backward_workspace_bytes(const AttentionShape& shape, const Tensor& on) {
  return on.is_cuda() ? cuda_backward_workspace_bytes(shape)
                      : cpu::backward_workspace_bytes(shape, max_workers());
}

std::string explain(const ForwardParams& p, const Tensor& on) {
  return on.is_cuda() ? cuda_explain(p, on) : "cpu";
}

std::string explain(const BackwardParams& p, const Tensor& on) {
  return on.is_cuda() ? cuda_explain(p, on) : "cpu";
}

}  // namespace attn_qat::torch_glue
