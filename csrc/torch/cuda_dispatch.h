// The only place that reads a device's capability and torch's current stream.
#pragma once
#include "checks.h"

namespace attn_qat::torch_glue {

// Runs on the device and current stream of `on`; the current device is the same afterwards.
void cuda_fake_quantize(const QuantizeParams&, const Tensor& on);

}  // namespace attn_qat::torch_glue
