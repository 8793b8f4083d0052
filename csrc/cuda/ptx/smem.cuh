// Shared memory addresses and the instructions that take them.
#pragma once
#include <cstdint>

namespace attn_qat::ptx {

struct SmemAddr {
  uint32_t bits;
};

__device__ __forceinline__ SmemAddr smem_addr(const void* p) {
  return {static_cast<uint32_t>(__cvta_generic_to_shared(p))};
}

// PTX ISA: ldmatrix. Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix
// l / 8.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], SmemAddr row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row.bits)
               : "memory");
}

// PTX ISA: ldmatrix, each matrix transposed.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], SmemAddr row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row.bits)
               : "memory");
}

// PTX ISA: stmatrix, each matrix transposed: the counterpart of ldmatrix_x4_trans. sm_90 on.
__device__ __forceinline__ void stmatrix_x4_trans(SmemAddr row, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(row.bits),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// PTX ISA: cp.async, 16 bytes; with `valid` false the 16 bytes become zero and nothing is read.
__device__ __forceinline__ void cp_async_16(SmemAddr to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to.bits), "l"(from), "r"(valid ? 16 : 0)
               : "memory");
}

// PTX ISA: cp.async.commit_group
__device__ __forceinline__ void cp_async_commit_group() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// PTX ISA: cp.async.wait_group: all but the newest kGroups of this thread's groups have landed.
template <int kGroups>
__device__ __forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

}  // namespace attn_qat::ptx
