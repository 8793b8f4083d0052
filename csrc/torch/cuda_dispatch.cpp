#include "cuda_dispatch.h"

#if ATTN_QAT_CUDA

#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "build_info.h"
#include "cuda/launch.h"

// Defined by libtorch_cuda.so alone: null beside a torch without CUDA.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device,
                                                                                   void** stream);

namespace attn_qat::torch_glue {
namespace {

constexpr int kAnyCapability = 0;

// First match wins. A family says why it does not take a problem; if none does, the error lists what each said.
template <class Params>
struct Family {
  const char* name;
  int capability;  // 10 major + minor of the only devices it is compiled for, or kAnyCapability: all
  const char* (*why_not)(const Params&);
  size_t (*workspace_bytes)(const Params&);
  cudaError_t (*launch)(const Params&, void* workspace, cudaStream_t);
};

constexpr Family<QuantizeParams> kFakeQuantize[] = {
    {"common", kAnyCapability, common::why_not, [](const QuantizeParams&) { return size_t{0}; },
     [](const QuantizeParams& p, void*, cudaStream_t s) { return common::fake_quantize(p, s); }}};

constexpr Family<QuantizeParams> kQuantize[] = {
    {"common", kAnyCapability, common::why_not, [](const QuantizeParams&) { return size_t{0}; },
     [](const QuantizeParams& p, void*, cudaStream_t s) { return common::quantize(p, s); }}};

constexpr Family<QuantizeParams> kDequantize[] = {
    {"common", kAnyCapability, common::why_not, [](const QuantizeParams&) { return size_t{0}; },
     [](const QuantizeParams& p, void*, cudaStream_t s) { return common::dequantize(p, s); }}};

constexpr Family<PreprocessParams> kPreprocess[] = {
    {"common", kAnyCapability, common::why_not, [](const PreprocessParams&) { return size_t{0}; },
     [](const PreprocessParams& p, void*, cudaStream_t s) { return common::preprocess(p, s); }}};

// Inference too, without training outputs: a family of one kind says so in why_not.
constexpr Family<ForwardParams> kForward[] = {
    {"sm90", 90, sm90::why_not,
     [](const ForwardParams& p) { return sm90::forward_workspace_bytes(p.shape, p.recipe); }, sm90::forward},
    {"mma_sync", kAnyCapability, mma_sync::why_not,
     [](const ForwardParams& p) { return mma_sync::forward_workspace_bytes(p.shape, p.recipe); },
     mma_sync::forward}};

constexpr Family<BackwardParams> kBackward[] = {
    {"sm90", 90, sm90::why_not,
     [](const BackwardParams& p) { return sm90::backward_workspace_bytes(p.shape); }, sm90::backward},
    {"mma_sync", kAnyCapability, mma_sync::why_not,
     [](const BackwardParams& p) { return mma_sync::backward_workspace_bytes(p.shape); },
     mma_sync::backward}};

void check_cuda(const char* op, cudaError_t status) {
  if (status == cudaSuccess) return;
  std::ostringstream text;
  text << op << ": CUDA reports " << cudaGetErrorString(status);
  if (status == cudaErrorInsufficientDriver)
    text << " (the CUDA 13 runtime needs a driver of series 580 or newer)";
  throw std::runtime_error(text.str());
}

// 10 major + minor. Machine code moves neither up nor down between the targets that the kernels are compiled for.
int check_target(const char* op, int device) {
  int major = 0, minor = 0;
  check_cuda(op, cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  check_cuda(op, cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  const std::string target = "sm_" + std::to_string(major * 10 + minor) + "a";
  if ((" " + std::string(ATTN_QAT_CUDA_TARGETS) + " ").find(" " + target + " ") == std::string::npos)
    throw std::runtime_error(std::string(op) + ": no CUDA kernel for compute capability " +
                             std::to_string(major) + "." + std::to_string(minor) +
                             "; this build holds " ATTN_QAT_CUDA_TARGETS);
  return major * 10 + minor;
}

cudaStream_t current_stream(const char* op, int device) {
  void* stream = nullptr;
  if (!aoti_torch_get_current_cuda_stream || aoti_torch_get_current_cuda_stream(device, &stream) != 0)
    throw std::runtime_error(std::string(op) + ": this torch does not tell its current CUDA stream");
  return static_cast<cudaStream_t>(stream);
}

// ATTN_QAT_KERNELS=<family>: only that family and `common` are considered, for tests and measurements.
bool switched_off(const char* family) {
  const char* only = std::getenv("ATTN_QAT_KERNELS");
  return only && *only && std::strcmp(only, family) != 0 && std::strcmp(family, "common") != 0;
}

// nullptr, or why the family does not run the problem on a device of this capability.
template <class Params>
const char* why_not(const Family<Params>& family, int capability, const Params& p) {
  if (switched_off(family.name)) return "switched off by ATTN_QAT_KERNELS";
  if (family.capability != kAnyCapability && family.capability != capability)
    return "compiled for another compute capability";
  return family.why_not(p);
}

template <class Params>
struct Choice {
  const Family<Params>* family;  // nullptr: none takes the problem
  std::string reasons;           // of those before it
};

template <class Params, size_t kCount>
Choice<Params> choose(const Family<Params> (&families)[kCount], int capability, const Params& p) {
  std::string reasons;
  for (const auto& family : families) {
    const char* reason = why_not(family, capability, p);
    if (!reason) return {&family, reasons};
    reasons += std::string(reasons.empty() ? "" : "; ") + family.name + ": " + reason;
  }
  return {nullptr, reasons};
}

// `given`: the caller's workspace, or nullptr to take one from torch's allocator.
template <class Params, size_t kCount>
void run(const char* op, const Family<Params> (&families)[kCount], const Params& p, void* given,
         const Tensor& on) {
  const int device = on.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const Choice<Params> choice = choose(families, check_target(op, device), p);
  if (!choice.family)
    throw std::runtime_error(std::string(op) + ": no CUDA kernel takes this problem (" + choice.reasons +
                             ")");
  const Family<Params>& family = *choice.family;
  std::optional<Tensor> own;
  if (!given) {
    const auto bytes = static_cast<int64_t>(family.workspace_bytes(p));
    if (bytes > 0) own = torch::stable::new_empty(on, {bytes}, ScalarType::Byte);
  }
  void* workspace = own ? own->data_ptr() : given;
  check_cuda(op, family.launch(p, workspace, current_stream(op, device)));
}

template <class Params, size_t kCount>
std::string explain(const Family<Params> (&families)[kCount], const Params& p, const Tensor& on) {
  const Choice<Params> choice = choose(families, check_target("explain", on.get_device_index()), p);
  const std::string name = choice.family ? choice.family->name : "none";
  return choice.reasons.empty() ? name : name + " (" + choice.reasons + ")";
}

}  // namespace

std::string cuda_explain(const ForwardParams& p, const Tensor& on) { return explain(kForward, p, on); }
std::string cuda_explain(const BackwardParams& p, const Tensor& on) { return explain(kBackward, p, on); }

void cuda_fake_quantize(const QuantizeParams& p, const Tensor& on) {
  run("fake_quantize", kFakeQuantize, p, nullptr, on);
}

void cuda_quantize(const QuantizeParams& p, const Tensor& on) { run("quantize", kQuantize, p, nullptr, on); }

void cuda_dequantize(const QuantizeParams& p, const Tensor& on) {
  run("dequantize", kDequantize, p, nullptr, on);
}

void cuda_preprocess(const PreprocessParams& p, const Tensor& on) {
  run("preprocess", kPreprocess, p, nullptr, on);
}

void cuda_forward(const char* op, const ForwardParams& p, const Tensor& on) {
  run(op, kForward, p, nullptr, on);
}

void cuda_backward(const BackwardParams& p, const Tensor& on) { run("backward", kBackward, p, nullptr, on); }

void cuda_backward(const BackwardParams& p, void* workspace, const Tensor& on) {
  run("backward", kBackward, p, workspace, on);
}

size_t cuda_backward_workspace_bytes(const AttentionShape& shape) {
  BackwardParams p{};
  p.shape = shape;
  size_t most = 0;
  for (const auto& family : kBackward) most = std::max(most, family.workspace_bytes(p));
  return most;
}

}  // namespace attn_qat::torch_glue

#else

namespace attn_qat::torch_glue {

[[noreturn]] static void refuse_cuda() {
  throw std::runtime_error("attn_qat: this build has no CUDA kernels");
}

void cuda_fake_quantize(const QuantizeParams&, const Tensor&) { refuse_cuda(); }
void cuda_quantize(const QuantizeParams&, const Tensor&) { refuse_cuda(); }
void cuda_dequantize(const QuantizeParams&, const Tensor&) { refuse_cuda(); }
void cuda_preprocess(const PreprocessParams&, const Tensor&) { refuse_cuda(); }
void cuda_forward(const char*, const ForwardParams&, const Tensor&) { refuse_cuda(); }
void cuda_backward(const BackwardParams&, const Tensor&) { refuse_cuda(); }
void cuda_backward(const BackwardParams&, void*, const Tensor&) { refuse_cuda(); }
size_t cuda_backward_workspace_bytes(const AttentionShape&) { refuse_cuda(); }
std::string cuda_explain(const ForwardParams&, const Tensor&) { refuse_cuda(); }
std::string cuda_explain(const BackwardParams&, const Tensor&) { refuse_cuda(); }

}  // namespace attn_qat::torch_glue

#endif
