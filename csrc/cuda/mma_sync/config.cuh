// Tile shapes of the portable kernels. Every launch derives its grid, block and shared memory from one of
// these.
#pragma once
#include "format/nvfp4.h"
#include "params.h"

namespace attn_qat::mma_sync {

inline constexpr int kWarpRows = 16;          // rows of an mma.sync A fragment: what one warp owns
inline constexpr int kSmemLimit = 99 * 1024;  // of a thread block on compute capability 12.x

// With 64 columns a warp needs few enough registers for three blocks of four warps on an SM, where it has the
// shared memory too; elsewhere a third block is not worth what it would spill.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
inline constexpr int kNarrowBlocksPerSm = 2;
#else
inline constexpr int kNarrowBlocksPerSm = 3;
#endif

template <int kHeadDim_>
struct ForwardConfig {
  static constexpr int kHeadDim = kHeadDim_, kTileQ = kHeadDim == 64 ? 64 : 128, kTileK = 64, kStages = 2;
  static constexpr int kWarps = kTileQ / kWarpRows, kThreads = kWarps * 32,
                       kBlocksPerSm = kHeadDim == 64 ? kNarrowBlocksPerSm : 1;
  static_assert(kTileK == 4 * nvfp4::kBlock, "each of the four lanes of a row owns one block of P");
};

template <int kHeadDim_>
struct BackwardDqConfig {
  static constexpr int kHeadDim = kHeadDim_, kTileQ = kHeadDim == 64 ? 64 : 128, kTileK = 64, kStages = 2;
  static constexpr int kWarps = kTileQ / kWarpRows, kThreads = kWarps * 32,
                       kBlocksPerSm = kHeadDim == 64 ? kNarrowBlocksPerSm : 1;
  static constexpr int kStepK = 32;  // keys whose S and dP are in registers at a time
};

template <int kHeadDim_>
struct BackwardDkDvConfig {
  static constexpr int kHeadDim = kHeadDim_, kTileQ = 32, kTileK = kHeadDim == 64 ? 64 : 128, kStages = 2;
  static constexpr int kWarps = kTileK / kWarpRows, kThreads = kWarps * 32,
                       kBlocksPerSm = kHeadDim == 64 ? kNarrowBlocksPerSm : 1;
  static_assert(kWarpRows == nvfp4::kBlock, "a block of P runs along keys: it must lie in one warp");
  static_assert(kTileQ == 32, "the eight lanes of a column own one of its eight columns each");
};

}  // namespace attn_qat::mma_sync
