// Pauses of random length at every barrier, in a build that looks for races (-DATTN_QAT_INJECT_DELAYS); else nothing.
#pragma once
#include <cstdint>

#include "cuda/ptx/special_registers.cuh"

namespace attn_qat::ptx {

// One time in four up to 2 microseconds: another draw for each warp, block and time, the same for the lanes of a warp.
__device__ __forceinline__ void inject_delay() {
#ifdef ATTN_QAT_INJECT_DELAYS
  const uint32_t warp = tid_x() / 32 + ctaid_x() * 32;
  const uint32_t draw = (static_cast<uint32_t>(clock()) ^ warp * 0x9e3779b9u) * 0x85ebca6bu;
  if (draw >> 30 == 0) __nanosleep(draw >> 16 & 2047);
#endif
}

}  // namespace attn_qat::ptx
