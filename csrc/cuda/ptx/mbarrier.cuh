// Barriers in shared memory that count arrivals and bytes. PTX ISA: Parallel Synchronization, mbarrier. sm_90 on.
#pragma once
#include <cstdint>

#include "cuda/ptx/delay.cuh"
#include "cuda/ptx/smem.cuh"

namespace attn_qat::ptx {

__device__ __forceinline__ void mbarrier_init(uint64_t& barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_addr(&barrier).bits), "r"(arrivals)
               : "memory");
}
// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint64_t& barrier) {
  inject_delay();
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_addr(&barrier).bits) : "memory");
}
// Arrives, and holds the phase open until `bytes` more have been copied.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint64_t& barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_addr(&barrier).bits),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ bool mbarrier_try_wait(uint64_t& barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{ .reg .pred p;\n"
      "  mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "  selp.u32 %0, 1, 0, p; }"
      : "=r"(done)
      : "r"(smem_addr(&barrier).bits), "r"(parity)
      : "memory");
  return done;
}
// Waits for the end of the phase of this parity; the first phase has parity 0.
__device__ __forceinline__ void mbarrier_wait(uint64_t& barrier, uint32_t parity) {
  while (!mbarrier_try_wait(barrier, parity)) {
  }
  inject_delay();
}

}  // namespace attn_qat::ptx
