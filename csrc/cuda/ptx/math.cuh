// Special functions. PTX ISA: Floating Point Instructions.
#pragma once

namespace attn_qat::ptx {

// ex2.approx.ftz.f32: 2^x within 2 ulp, results below 2^-126 become 0, -inf gives 0.
__device__ __forceinline__ float ex2_approx_ftz(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// rcp.approx.ftz.f32: 1 / x within 1 ulp.
__device__ __forceinline__ float rcp_approx_ftz(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace attn_qat::ptx
