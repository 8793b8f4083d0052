// The kernels of this family on operands that are already quantised: Q^ and K^ in BF16, V^ in the input
// dtype.
#pragma once
#include "cuda/launch.h"

namespace attn_qat::mma_sync {

cudaError_t launch_forward(const ForwardParams&, cudaStream_t);
cudaError_t launch_backward_dq(const BackwardParams&, const RowStatistics*, cudaStream_t);
cudaError_t launch_backward_dkdv(const BackwardParams&, const RowStatistics*, cudaStream_t);

}  // namespace attn_qat::mma_sync
