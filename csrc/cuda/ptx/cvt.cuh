// Conversions between FP32, FP16 and packed E2M1. PTX ISA: Data Movement and Conversion Instructions, cvt.
// E2M1 conversions exist on 10.x and 12.x architecture- and family-specific targets only.
#pragma once
#include <cstdint>

namespace attn_qat::ptx {

#if defined(__CUDA_ARCH_FAMILY_SPECIFIC__) && __CUDA_ARCH_FAMILY_SPECIFIC__ >= 1000
#define ATTN_QAT_HAS_E2M1 1

// cvt.rn.satfinite.e2m1x2.f32: `high` goes to bits 4..7, `low` to bits 0..3. NaN gives +6.
__device__ __forceinline__ uint32_t cvt_rn_satfinite_e2m1x2_f32(float high, float low) {
  uint32_t codes;
  asm("{ .reg .b8 pair;\n"
      "  cvt.rn.satfinite.e2m1x2.f32 pair, %1, %2;\n"
      "  cvt.u32.u8 %0, pair; }"
      : "=r"(codes)
      : "f"(high), "f"(low));
  return codes;
}

// cvt.rn.f16x2.e2m1x2: bits 4..7 go to the upper FP16, bits 0..3 to the lower one. Exact.
__device__ __forceinline__ uint32_t cvt_rn_f16x2_e2m1x2(uint32_t codes) {
  uint32_t halves;
  asm("{ .reg .b8 pair;\n"
      "  cvt.u8.u32 pair, %1;\n"
      "  cvt.rn.f16x2.e2m1x2 %0, pair; }"
      : "=r"(halves)
      : "r"(codes));
  return halves;
}
#else
#define ATTN_QAT_HAS_E2M1 0
#endif

}  // namespace attn_qat::ptx
