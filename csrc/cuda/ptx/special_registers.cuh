// Special registers, read anew at every use.
#pragma once
#include <cstdint>

namespace attn_qat::ptx {

// PTX ISA: %laneid, read anew: what is computed from it is not kept in registers from an earlier use.
__device__ __forceinline__ int laneid() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// PTX ISA: %ctaid.x and %tid.x, likewise read anew.
__device__ __forceinline__ uint32_t ctaid_x() {
  uint32_t index;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
  return index;
}

__device__ __forceinline__ uint32_t tid_x() {
  uint32_t index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

}  // namespace attn_qat::ptx
