// What warpgroups of one thread block share: registers, named barriers, the order of shared memory. sm_90a only.
#pragma once
#include <cstdint>

#include "cuda/ptx/delay.cuh"

namespace attn_qat::ptx {

// PTX ISA: setmaxnreg. All warps of a warpgroup, in one branch of a single if/else.
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// PTX ISA: bar.sync and bar.arrive among kThreads threads. Barrier 0 is __syncthreads().
template <int kThreads>
__device__ __forceinline__ void named_barrier_sync(int id) {
  inject_delay();
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}
template <int kThreads>
__device__ __forceinline__ void named_barrier_arrive(int id) {
  inject_delay();
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

// PTX ISA: fence.proxy.async: this thread's ordinary stores to shared memory come before what wgmma and bulk copies
// read after a barrier.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace attn_qat::ptx
