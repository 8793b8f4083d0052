// Forward with wgmma: one thread block for 128 query rows of a head. A producer warp copies K^ and V^ tiles of 128 keys
// through two stages each; two warpgroups multiply, 64 rows each:
//
//   S = Q^ K^^T   p = exp2(t - E)   O_hp += p V^   O += P^ V^ with P^ = p quantised along keys
//
// One step of a consumer where P is quantised: the products of the tile's first 64 keys run under the softmax of the
// others. Nothing is in flight from one step to the next; the other consumer, half a step away, fills the gaps. Two
// consumers with one block to a row (fp4_qk), or with 64 columns, take turns at the tensor cores instead.
//
//   tensor cores   S      |                         | O_hp, O (keys 0-63)       | O_hp, O (keys 64-127), row sums
//   CUDA cores            | E, p and P^ (keys 0-63) | p and P^ (keys 64-127)    |
//
// Where P is quantised, keys are interleaved by the tensor map (tensor_map.h), so that a thread holds whole blocks of
// 16 keys of a row: no shuffles, and a block's maximum falls out of the row maximum. S is turned in place into the two
// packed left operands, p and P^: 64 registers where it had 64.
//
// Recipe cudnn quantises against the final E (contract section 3): a first pass over K^ finds it.
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/ptx/bulk.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/sm90/forward_consumer.cuh"
#include "cuda/sm90/launch.cuh"

namespace attn_qat::sm90 {
namespace {

template <class C, class T, Recipe kRecipe>
__device__ __forceinline__ void forward_produce(const ForwardArgs& args, ForwardSmem<C, T>& smem,
                                                const ForwardPlace<C>& here) {
  constexpr bool kInterleaved = kRecipe != Recipe::kFp4Qk;
  constexpr int kPanels = C::kHeadDim / kPanelColumns, kBox = 64;
  constexpr uint32_t kTileBytes = panel_bytes(C::kTileK) * kPanels;
  const int first_box = (here.b * static_cast<int>(args.p.shape.heads_kv) + here.h_kv) * args.key_boxes;
  const auto load_keys = [&](void* tile, const CUtensorMap& map, uint64_t& full, int j) {
    ptx::mbarrier_arrive_expect_tx(full, kTileBytes);
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      const ptx::SmemAddr to{ptx::smem_addr(tile).bits + panel * panel_bytes(C::kTileK)};
      if constexpr (kInterleaved)
        for (int box = 0; box < C::kTileK / kBox; ++box)
          ptx::load_box({to.bits + box * panel_bytes(kBox)}, map, full, panel * kPanelColumns, 0, 0, 0,
                        first_box + j * (C::kTileK / kBox) + box);
      else
        ptx::load_box(to, map, full, panel * kPanelColumns, j * C::kTileK, here.h_kv, here.b);
    }
  };

  ptx::mbarrier_arrive_expect_tx(smem.q_full, panel_bytes(C::kTileQ) * kPanels);
  for (int panel = 0; panel < kPanels; ++panel)
    ptx::load_box({ptx::smem_addr(smem.q).bits + panel * panel_bytes(C::kTileQ)}, args.q, smem.q_full,
                  panel * kPanelColumns, here.first_row, here.h, here.b);
  const auto load_k = [&](int j, int use) {
    const int stage = stage_of<C::kStages>(use);
    ptx::mbarrier_wait(smem.k_empty[stage], parity_of<C::kStages>(use) ^ 1);
    load_keys(smem.k[stage], args.k, smem.k_full[stage], j);
  };
  constexpr bool kTwoPasses = kRecipe == Recipe::kCudnn;
  if constexpr (kTwoPasses)
    for (int j = 0; j < here.tiles_k; ++j) load_k(j, j);
  for (int j = 0; j < here.tiles_k; ++j) {
    load_k(j, kTwoPasses ? here.tiles_k + j : j);
    const int stage = stage_of<C::kStages>(j);
    ptx::mbarrier_wait(smem.v_empty[stage], parity_of<C::kStages>(j) ^ 1);
    load_keys(smem.v[stage].values, args.v, smem.v_full[stage], j);
  }
}

template <class C, class T, Recipe kRecipe, bool kTraining>
__global__ void __launch_bounds__(kThreads, 1) forward_kernel(const __grid_constant__ ForwardArgs args) {
  extern __shared__ __align__(1024) unsigned char raw[];
  auto& smem = *reinterpret_cast<ForwardSmem<C, T>*>(raw);
  const int warpgroup =
      __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroup, 0);  // known to be the same in a warp
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(smem.q_full, 1);
    for (int i = 0; i < C::kStages; ++i) {
      ptx::mbarrier_init(smem.k_full[i], 1), ptx::mbarrier_init(smem.v_full[i], 1);
      ptx::mbarrier_init(smem.k_empty[i], kConsumerWarps);
      ptx::mbarrier_init(smem.v_empty[i], kConsumerWarps);
    }
    ptx::fence_mbarrier_init();
  }
  for (auto& tile : smem.v)
    for (int i = threadIdx.x; i < C::kTileK * kPanelColumns; i += kThreads) tile.ones[i] = T(1.0f);
  ptx::fence_proxy_async();
  __syncthreads();
  const ForwardPlace<C> here(args, blockIdx.x);
  if (warpgroup == 0) {
    ptx::give_registers<kProducerRegisters>();
    if (threadIdx.x == 0) forward_produce<C, T, kRecipe>(args, smem, here);
  } else {
    ptx::take_registers<kConsumerRegisters>();
    forward_consume<C, T, kRecipe, kTraining>(args, smem, here, warpgroup - 1);
  }
}

template <class C, class T, Recipe kRecipe, bool kTraining>
cudaError_t launch(const ForwardParams& p, int64_t padded_keys, cudaStream_t stream) {
  const AttentionShape& s = p.shape;
  ForwardArgs args{};
  args.p = p;
  args.tiles_q = static_cast<int>((s.seq_q + C::kTileQ - 1) / C::kTileQ);
  args.key_boxes = static_cast<int>(padded_keys / 64);
  args.scale_log2 = scale_log2(p.softmax_scale);
  cudaError_t status =
      rows_map(&args.q, p.q, s.batch, s.heads_q, s.seq_q, s.head_dim, C::kTileQ, DType::kBFloat16);
  const auto keys_map = [&](CUtensorMap* map, const View& x, DType dtype) {
    if (status != cudaSuccess) return;
    status = kRecipe == Recipe::kFp4Qk
                 ? rows_map(map, x, s.batch, s.heads_kv, s.seq_k, s.head_dim, C::kTileK, dtype)
                 : interleaved_rows_map(map, x.data, s.batch * s.heads_kv * padded_keys, s.head_dim, dtype);
  };
  keys_map(&args.k, p.k, DType::kBFloat16);
  keys_map(&args.v, p.v, p.dtype);
  if (status != cudaSuccess) return status;
  return launch_tiles<ForwardSmem<C, T>>(forward_kernel<C, T, kRecipe, kTraining>, args,
                                         args.tiles_q * s.batch * s.heads_q, stream);
}

template <class C, class T>
cudaError_t launch_recipe(const ForwardParams& p, int64_t padded_keys, cudaStream_t stream) {
  switch (p.recipe) {
    case Recipe::kCudnn: return launch<C, T, Recipe::kCudnn, true>(p, padded_keys, stream);
    case Recipe::kFp4:
      return p.training() ? launch<C, T, Recipe::kFp4, true>(p, padded_keys, stream)
                          : launch<C, T, Recipe::kFp4, false>(p, padded_keys, stream);
    case Recipe::kFp4Qk:
      return p.training() ? launch<C, T, Recipe::kFp4Qk, true>(p, padded_keys, stream)
                          : launch<C, T, Recipe::kFp4Qk, false>(p, padded_keys, stream);
  }
  return cudaErrorInvalidValue;
}

template <class T>
cudaError_t launch_head_dim(const ForwardParams& p, int64_t padded_keys, cudaStream_t stream) {
  if (p.shape.head_dim == 64) return launch_recipe<ForwardConfig<64>, T>(p, padded_keys, stream);
  return launch_recipe<ForwardConfig<128>, T>(p, padded_keys, stream);
}

}  // namespace

cudaError_t launch_forward(const ForwardParams& p, int64_t padded_keys, cudaStream_t stream) {
  return p.dtype == DType::kFloat16 ? launch_head_dim<__half>(p, padded_keys, stream)
                                    : launch_head_dim<__nv_bfloat16>(p, padded_keys, stream);
}

}  // namespace attn_qat::sm90
