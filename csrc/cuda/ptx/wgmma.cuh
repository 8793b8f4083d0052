// Warpgroup matrix products. PTX ISA: Asynchronous Warpgroup Level Matrix Instructions. sm_90a only.
//
// d += a b with d (64 x N) in FP32 registers: warp w of the warpgroup owns rows 16 w .. 16 w + 15, each like the
// accumulator of mma_m16n8k16, so d[j] holds columns 8 j .. 8 j + 7. a (64 x 16) comes from shared memory,
// K-major, or from registers, each warp's as the A fragment of mma_m16n8k16; b (16 x N) from shared memory,
// K-major, or MN-major with kTransB.
//
// Between wgmma_fence() and the wait that retires them, registers of a product may not be touched; hold() tells the
// compiler so.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace attn_qat::ptx {

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// All but the newest kGroups groups have retired.
template <int kGroups>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
}

template <int kTiles>
__device__ __forceinline__ void hold(float (&d)[kTiles][4]) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) asm volatile("" : "+f"(d[i][j])::"memory");
}

__device__ __forceinline__ void hold(uint32_t (&a)[4]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) asm volatile("" : "+r"(a[j])::"memory");
}
template <int kSteps>
__device__ __forceinline__ void hold(uint32_t (&a)[kSteps][4]) {
#pragma unroll
  for (int i = 0; i < kSteps; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) asm volatile("" : "+r"(a[i][j])::"memory");
}

// Shared-memory matrix descriptor, 128-byte swizzle: rows of 128 bytes, groups of eight rows (1024 bytes) one after
// the other. panel_bytes: distance between 64-column panels of an MN-major operand.
__device__ __forceinline__ uint64_t smem_descriptor(uint32_t address, uint32_t panel_bytes = 0) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62, kGroupBytes = uint64_t{1024 / 16} << 32;
  return kSwizzle128 | kGroupBytes | uint64_t{(panel_bytes & 0x3ffff) >> 4} << 16 |
         ((address & 0x3ffff) >> 4);
}
// Without swizzle, K-major: core matrices of 8 rows by 16 bytes, one after the other; from one to the next along K and
// along rows so many bytes.
__device__ __forceinline__ uint64_t smem_descriptor_unswizzled(uint32_t address, uint32_t next_columns,
                                                               uint32_t next_rows) {
  return uint64_t{next_rows >> 4} << 32 | uint64_t{next_columns >> 4} << 16 | ((address & 0x3ffff) >> 4);
}
__device__ __forceinline__ uint64_t advance(uint64_t descriptor, uint32_t bytes) {
  return descriptor + (bytes >> 4);
}

#define ATTN_QAT_ACC(d, j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define ATTN_QAT_ACC8(d, j)                                                                   \
  ATTN_QAT_ACC(d, j), ATTN_QAT_ACC(d, j + 1), ATTN_QAT_ACC(d, j + 2), ATTN_QAT_ACC(d, j + 3), \
      ATTN_QAT_ACC(d, j + 4), ATTN_QAT_ACC(d, j + 5), ATTN_QAT_ACC(d, j + 6), ATTN_QAT_ACC(d, j + 7)
#define ATTN_QAT_D32                                                                                        \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27," \
  "%28,%29,%30,%31}"
#define ATTN_QAT_D36                                                                                    \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26," \
  "%27,%28,%29,%30,%31,%32,%33,%34,%35}"
#define ATTN_QAT_D64                                                                                         \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,"  \
  "%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53," \
  "%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}"
#define ATTN_QAT_D68                                                                                     \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,"  \
  "%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51," \
  "%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67}"

// wgmma for one width and type, a from shared memory and from registers. With `accumulate` false d starts at 0.
#define ATTN_QAT_WGMMA(N, TILES, D, TYPE, T, A0, A1, A2, A3, A4, A5, ...)                                   \
  template <int kTransB>                                                                                    \
  __device__ __forceinline__ void wgmma(float (&d)[TILES][4], uint64_t a, uint64_t b, bool accumulate, T) { \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, " A2                                                       \
                 ", 0;\n"                                                                                   \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " " D ", " A0 ", " A1      \
                 ", p, 1, 1, 0, " A3 "; }"                                                                  \
                 : __VA_ARGS__                                                                              \
                 : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(kTransB)                          \
                 : "memory");                                                                               \
  }                                                                                                         \
  template <int kTransB>                                                                                    \
  __device__ __forceinline__ void wgmma(float (&d)[TILES][4], const uint32_t (&a)[4], uint64_t b,           \
                                        bool accumulate, T) {                                               \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, " A5                                                       \
                 ", 0;\n"                                                                                   \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " " D ", {" A0 "," A1      \
                 "," A2 "," A3 "}, " A4 ", p, 1, 1, %" ATTN_QAT_TRANS_##TILES "; }"                         \
                 : __VA_ARGS__                                                                              \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)),   \
                   "n"(kTransB)                                                                             \
                 : "memory");                                                                               \
  }
#define ATTN_QAT_TRANS_1 "10"
#define ATTN_QAT_TRANS_8 "38"
#define ATTN_QAT_TRANS_9 "42"
#define ATTN_QAT_TRANS_16 "70"
#define ATTN_QAT_TRANS_17 "74"
#define ATTN_QAT_WGMMA_8(TYPE, T) \
  ATTN_QAT_WGMMA(8, 1, "{%0,%1,%2,%3}", TYPE, T, "%4", "%5", "%6", "%7", "%8", "%9", ATTN_QAT_ACC(d, 0))
#define ATTN_QAT_WGMMA_64(TYPE, T) \
  ATTN_QAT_WGMMA(64, 8, ATTN_QAT_D32, TYPE, T, "%32", "%33", "%34", "%35", "%36", "%37", ATTN_QAT_ACC8(d, 0))
#define ATTN_QAT_WGMMA_72(TYPE, T)                                                       \
  ATTN_QAT_WGMMA(72, 9, ATTN_QAT_D36, TYPE, T, "%36", "%37", "%38", "%39", "%40", "%41", \
                 ATTN_QAT_ACC8(d, 0), ATTN_QAT_ACC(d, 8))
#define ATTN_QAT_WGMMA_128(TYPE, T)                                                        \
  ATTN_QAT_WGMMA(128, 16, ATTN_QAT_D64, TYPE, T, "%64", "%65", "%66", "%67", "%68", "%69", \
                 ATTN_QAT_ACC8(d, 0), ATTN_QAT_ACC8(d, 8))
#define ATTN_QAT_WGMMA_136(TYPE, T)                                                        \
  ATTN_QAT_WGMMA(136, 17, ATTN_QAT_D68, TYPE, T, "%68", "%69", "%70", "%71", "%72", "%73", \
                 ATTN_QAT_ACC8(d, 0), ATTN_QAT_ACC8(d, 8), ATTN_QAT_ACC(d, 16))

ATTN_QAT_WGMMA_8("bf16", __nv_bfloat16)
ATTN_QAT_WGMMA_8("f16", __half)
ATTN_QAT_WGMMA_64("bf16", __nv_bfloat16)
ATTN_QAT_WGMMA_64("f16", __half)
ATTN_QAT_WGMMA_72("bf16", __nv_bfloat16)
ATTN_QAT_WGMMA_72("f16", __half)
ATTN_QAT_WGMMA_128("bf16", __nv_bfloat16)
ATTN_QAT_WGMMA_128("f16", __half)
ATTN_QAT_WGMMA_136("bf16", __nv_bfloat16)
ATTN_QAT_WGMMA_136("f16", __half)

#undef ATTN_QAT_WGMMA_136
#undef ATTN_QAT_WGMMA_128
#undef ATTN_QAT_WGMMA_72
#undef ATTN_QAT_WGMMA_64
#undef ATTN_QAT_WGMMA_8
#undef ATTN_QAT_TRANS_17
#undef ATTN_QAT_TRANS_16
#undef ATTN_QAT_TRANS_9
#undef ATTN_QAT_TRANS_8
#undef ATTN_QAT_TRANS_1
#undef ATTN_QAT_WGMMA
#undef ATTN_QAT_D68
#undef ATTN_QAT_D64
#undef ATTN_QAT_D36
#undef ATTN_QAT_D32
#undef ATTN_QAT_ACC8
#undef ATTN_QAT_ACC

}  // namespace attn_qat::ptx
