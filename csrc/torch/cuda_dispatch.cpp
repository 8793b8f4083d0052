#include "cuda_dispatch.h"

#if ATTN_QAT_CUDA

#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include <cstring>

#include "build_info.h"
#include "cuda/launch.h"

// Defined by libtorch_cuda.so alone: null beside a torch without CUDA.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void** stream);

namespace attn_qat::torch_glue {
namespace {

template <class Params>
struct Family {
  const char* name;
  const char* (*why_not)(const Params&);
  cudaError_t (*launch)(const Params&, cudaStream_t);
};

constexpr Family<QuantizeParams> kFakeQuantize[] = {{"common", common::why_not, common::fake_quantize}};

void check_cuda(const char* op, cudaError_t status) {
  if (status == cudaSuccess) return;
  std::ostringstream text;
  text << op << ": CUDA reports " << cudaGetErrorString(status);
  if (status == cudaErrorInsufficientDriver) text << " (the CUDA 13 runtime needs a driver of series 580 or newer)";
  throw std::runtime_error(text.str());
}

// Machine code moves neither up nor down between the targets that the kernels are compiled for.
void check_target(const char* op, int device) {
  int major = 0, minor = 0;
  check_cuda(op, cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  check_cuda(op, cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  const std::string target = "sm_" + std::to_string(major * 10 + minor) + "a";
  if ((" " + std::string(ATTN_QAT_CUDA_TARGETS) + " ").find(" " + target + " ") == std::string::npos)
    throw std::runtime_error(std::string(op) + ": no kernel for compute capability " + std::to_string(major) + "." +
                             std::to_string(minor) + "; this build holds " ATTN_QAT_CUDA_TARGETS);
}

cudaStream_t current_stream(const char* op, int device) {
  void* stream = nullptr;
  if (!aoti_torch_get_current_cuda_stream || aoti_torch_get_current_cuda_stream(device, &stream) != 0)
    throw std::runtime_error(std::string(op) + ": this torch does not tell its current CUDA stream");
  return static_cast<cudaStream_t>(stream);
}

template <class Params, size_t kCount>
void run(const char* op, const Family<Params> (&families)[kCount], const Params& p, const Tensor& on) {
  const int device = on.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  check_target(op, device);
  std::string reasons;
  for (const auto& family : families) {
    const char* reason = family.why_not(p);
    if (!reason) return check_cuda(op, family.launch(p, current_stream(op, device)));
    reasons += std::string(reasons.empty() ? "" : "; ") + family.name + ": " + reason;
  }
  throw std::runtime_error(std::string(op) + ": no kernel takes this problem (" + reasons + ")");
}

}  // namespace

void cuda_fake_quantize(const QuantizeParams& p, const Tensor& on) { run("fake_quantize", kFakeQuantize, p, on); }

}  // namespace attn_qat::torch_glue

#else

namespace attn_qat::torch_glue {

void cuda_fake_quantize(const QuantizeParams&, const Tensor&) {
  throw std::runtime_error("fake_quantize: this build has no CUDA kernels");
}

}  // namespace attn_qat::torch_glue

#endif
