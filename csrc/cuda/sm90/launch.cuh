// Launching a kernel of this family: one thread block a tile, dynamic shared memory of the size of its plan.
#pragma once
#include <cuda_runtime.h>

#include "cuda/sm90/config.cuh"

namespace attn_qat::sm90 {

template <class Smem, class Args>
cudaError_t launch_tiles(void (*kernel)(Args), const Args& args, int64_t tiles, cudaStream_t stream) {
  static_assert(sizeof(Smem) <= kSmemLimit, "must fit the shared memory of compute capability 9.0");
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Smem));
  if (status != cudaSuccess) return status;
  kernel<<<static_cast<unsigned>(tiles), kThreads, sizeof(Smem), stream>>>(args);
  return cudaGetLastError();
}

}  // namespace attn_qat::sm90
