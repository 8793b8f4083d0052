// Global memory that thread blocks share while they run.
#pragma once

namespace attn_qat::ptx {

// PTX ISA: ld.acquire.gpu and red.release.gpu: what came before the release is seen after the acquire, by any thread
// block.
__device__ __forceinline__ int load_acquire(const int* p) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
  return value;
}
__device__ __forceinline__ void add_release(int* p, int value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}

// PTX ISA: fence.proxy.async: global writes of this thread's bulk copies against its own and others' accesses.
__device__ __forceinline__ void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

}  // namespace attn_qat::ptx
