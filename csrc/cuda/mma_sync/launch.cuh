// Launching a kernel of this family: one thread block a tile, dynamic shared memory of the size of its plan.
#pragma once
#include <cuda_runtime.h>

#include "cuda/mma_sync/config.cuh"

namespace attn_qat::mma_sync {

template <class C, class Smem, class Args>
cudaError_t launch_tiles(void (*kernel)(Args), const Args& args, int64_t tiles, cudaStream_t stream) {
  static_assert(sizeof(Smem) <= kSmemLimit, "must fit the shared memory of compute capability 12.x");
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Smem));
  if (status != cudaSuccess) return status;
  kernel<<<static_cast<unsigned>(tiles), C::kThreads, sizeof(Smem), stream>>>(args);
  return cudaGetLastError();
}

}  // namespace attn_qat::mma_sync
