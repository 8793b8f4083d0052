// Asynchronous bulk copies. PTX ISA: Data Movement, cp.async.bulk, cp.reduce.async.bulk and
// cp.async.bulk.tensor. sm_90 on.
#pragma once
#include <cuda.h>

#include <cstdint>

#include "cuda/ptx/smem.cuh"

namespace attn_qat::ptx {

// One box of a tensor into shared memory, completing on `barrier`. Coordinates are innermost first; elements outside
// the tensor become zero and count as copied.
__device__ __forceinline__ void load_box(SmemAddr to, const CUtensorMap& map, uint64_t& barrier, int c0,
                                         int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, "
      "{%3,%4,%5,%6}], "
      "[%2];" ::"r"(to.bits),
      "l"(&map), "r"(smem_addr(&barrier).bits), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
__device__ __forceinline__ void load_box(SmemAddr to, const CUtensorMap& map, uint64_t& barrier, int c0,
                                         int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%3,%4,%5,%6,%7}], [%2];" ::"r"(to.bits),
      "l"(&map), "r"(smem_addr(&barrier).bits), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// `bytes`, a multiple of 16, from global to shared memory, completing on `barrier`.
__device__ __forceinline__ void load_bytes(SmemAddr to, const void* from, uint32_t bytes, uint64_t& barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          to.bits),
      "l"(from), "r"(bytes), "r"(smem_addr(&barrier).bits)
      : "memory");
}

// From shared to global memory; both join this thread's current bulk group.
__device__ __forceinline__ void store_bytes(void* to, SmemAddr from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from.bits),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void add_floats(void* to, SmemAddr from, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
               "r"(from.bits), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// This thread's bulk groups have read their shared memory.
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
// They have written global memory.
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

}  // namespace attn_qat::ptx
