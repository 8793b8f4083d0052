// The only place that reads a device's capability and torch's current stream.
#pragma once
#include "checks.h"

namespace attn_qat::torch_glue {

// All run on the device and current stream of `on`; the current device is the same afterwards.
void cuda_fake_quantize(const QuantizeParams&, const Tensor& on);
void cuda_quantize(const QuantizeParams&, const Tensor& on);
void cuda_dequantize(const QuantizeParams&, const Tensor& on);
void cuda_preprocess(const PreprocessParams&, const Tensor& on);
void cuda_forward(const char* op, const ForwardParams&, const Tensor& on);  // op: forward or infer
void cuda_backward(const BackwardParams&, const Tensor& on);
void cuda_backward(const BackwardParams&, void* workspace, const Tensor& on);  // allocates nothing
size_t cuda_backward_workspace_bytes(const AttentionShape&);                   // whichever family runs

// The kernel family that would run it, and in brackets why those before it would not.
std::string cuda_explain(const ForwardParams&, const Tensor& on);
std::string cuda_explain(const BackwardParams&, const Tensor& on);

}  // namespace attn_qat::torch_glue
