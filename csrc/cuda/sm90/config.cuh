// Tile shapes and warp roles of the Hopper kernels. Every launch derives its grid, block and shared memory from these.
#pragma once
#include "format/nvfp4.h"
#include "params.h"

namespace attn_qat::sm90 {

inline constexpr int kWarpgroup = 128;         // threads
inline constexpr int kWarpgroupRows = 64;      // of a wgmma accumulator
inline constexpr int kSmemLimit = 227 * 1024;  // of a thread block on compute capability 9.0

// A thread block: one warpgroup that feeds, and two that multiply and take over most of its registers.
inline constexpr int kConsumers = 2, kThreads = (1 + kConsumers) * kWarpgroup,
                     kConsumerWarps = kConsumers * kWarpgroup / 32;
inline constexpr int kRegistersAtLaunch = 65536 / kThreads / 8 * 8;
inline constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= (1 + kConsumers) * kRegistersAtLaunch);

// Named barriers; 0 is __syncthreads().
inline constexpr int kTurnBarrier = 1;  // + consumer: forward, whose matrix products are next

template <int kHeadDim_>
struct ForwardConfig {
  static constexpr int kHeadDim = kHeadDim_, kTileQ = kConsumers * kWarpgroupRows, kTileK = 128, kStages = 2;
};

template <int kHeadDim_>
struct BackwardConfig {
  static constexpr int kHeadDim = kHeadDim_, kTileQ = kHeadDim == 64 ? 128 : 64,
                       kTileK = kConsumers * kWarpgroupRows, kStages = 2;
};

// What every padded operand in scratch is padded to.
inline constexpr int kRowPadding = 128;

}  // namespace attn_qat::sm90
