// From a packed problem to the kernel that runs it, by device.
#pragma once
#include "checks.h"

namespace attn_qat::torch_glue {

// FP32, one element, on the device of `like`; on the CPU also checked to be finite and positive.
const float* check_global_scale(const char* op, const std::optional<Tensor>& global_scale,
                                const Tensor& like);

// Each runs on the device of `on`, with a workspace of its own where none is given.
void launch_fake_quantize(const QuantizeParams&, const Tensor& on);
void launch_quantize(const QuantizeParams&, const Tensor& on);
void launch_dequantize(const QuantizeParams&, const Tensor& on);
void launch_preprocess(const PreprocessParams&, const Tensor& on);
void launch_forward(const char* op, const ForwardParams&, const Tensor& on);
void launch_backward(const BackwardParams&, const Tensor& on);
void launch_backward(const BackwardParams&, void* workspace, const Tensor& on);
size_t backward_workspace_bytes(const AttentionShape&, const Tensor& on);

// The kernels that would run it on the device of `on`, and in brackets why others would not.
std::string explain(const ForwardParams&, const Tensor& on);
std::string explain(const BackwardParams&, const Tensor& on);

}  // namespace attn_qat::torch_glue
