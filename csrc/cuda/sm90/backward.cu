// dQ, dK and dV with wgmma, fused: one thread block for 128 keys of a kv head, looping over the query tiles of every
// query head in the group. Everything is transposed, so that a warpgroup owns its 64 keys:
//
//   S^T = K^ Q^T,  dP^T = V^ dO^T - delta,  p = exp2(t - E),  P = n p with n = 2^E exp(-lse),  dS^T = bf16(P dP^T)
//   dK += dS^T Q^,  dQ += dS K^,  dV += P^^T dO with P^ quantised along keys
//
// One step of a consumer warpgroup. Only dV needs P^, so the quantiser works in the shadow of dK and dQ; dQ leaves in
// the shadow of dV. Nothing is in flight from one step to the next; the other consumer fills the gaps.
//
//   tensor cores   S^T | dP^T |                    | dK           | dQ of the step before | dV
//   CUDA cores         | p    | dS, scales of P^   | store dS^T   | P^                    | stage dQ
//
// A query is a column, so that every warp needs the statistics of all queries of the tile: delta comes through the tensor
// cores, as one more step of dP^T, and of each warp's scales of P^ only the reciprocal is handed round.
//
// p, dS and P^ go from accumulators to left operands in registers. dS alone passes through shared memory, because dQ
// sums over the keys of both consumers: each stores its half transposed and multiplies all of it, for half of dQ. It
// does so a step later, so that neither waits for the other's half.
//
// dQ is summed over kv tiles in global memory, in FP32, in the order in which the accumulators hold it, by bulk copies
// that add. For the same bits on every run they go in turns: a counter for each query tile says how many kv tiles have
// been added. A thread block waits only for blocks that started before it: kv tiles add, and start, in ascending order;
// under a causal mask in descending order, so that nobody waits at the start. Kv tiles of several heads start side by
// side (kBlocksTogether), so that those of one head follow each other at the pace at which they add.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "cuda/ptx/bulk.cuh"
#include "cuda/ptx/global.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/sm90/backward_consumer.cuh"
#include "cuda/sm90/launch.cuh"

namespace attn_qat::sm90 {
namespace {

template <class C, class T>
__device__ __forceinline__ void backward_produce(const BackwardArgs& args, BackwardSmem<C, T>& smem,
                                                 const BackwardPlace<C>& here) {
  constexpr int kPanels = C::kHeadDim / kPanelColumns;
  const auto load = [&](void* tile, int rows, const CUtensorMap& map, uint64_t& full, int row, int h) {
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel)
      ptx::load_box({ptx::smem_addr(tile).bits + panel * panel_bytes(rows)}, map, full, panel * kPanelColumns,
                    row, h, here.b);
  };
  ptx::mbarrier_arrive_expect_tx(smem.kv_full, 2 * kPanels * panel_bytes(C::kTileK));
  load(smem.k, C::kTileK, args.k, smem.kv_full, here.first_key, here.h_kv);
  load(smem.v, C::kTileK, args.v, smem.kv_full, here.first_key, here.h_kv);
  constexpr uint32_t kTileBytes = kPanels * panel_bytes(C::kTileQ);
  here.for_each_tile(args.tiles_q, [&](int step, int h, int tile) {
    const int stage = step % C::kStages, row = tile * C::kTileQ;
    const uint32_t parity = (step / C::kStages & 1) ^ 1;
    const auto* statistics = reinterpret_cast<const char*>(args.statistics) +
                             here.query_tile(args, h, tile) * sizeof(smem.statistics[0]);
    ptx::mbarrier_wait(smem.q_empty[stage], parity);
    ptx::mbarrier_arrive_expect_tx(smem.q_full[stage], kTileBytes + sizeof(smem.statistics[0]));
    load(smem.q[stage], C::kTileQ, args.q, smem.q_full[stage], row, h);
    ptx::load_bytes(ptx::smem_addr(smem.statistics[stage]), statistics, sizeof(smem.statistics[0]),
                    smem.q_full[stage]);
    ptx::mbarrier_wait(smem.grad_empty[stage], parity);
    ptx::mbarrier_arrive_expect_tx(smem.grad_full[stage], kTileBytes);
    load(smem.grad_out[stage], C::kTileQ, args.grad_out, smem.grad_full[stage], row, h);
  });
}

// One thread: adds the dQ, if wanted, of every kAdders-th step to global memory.
template <class C, class T>
__device__ __forceinline__ void backward_add(const BackwardArgs& args, BackwardSmem<C, T>& smem,
                                             const BackwardPlace<C>& here, int adder) {
  constexpr uint32_t kBytes = sizeof(smem.dq[0]);
  const bool wanted = args.p.dq.data;
  here.for_each_tile(args.tiles_q, [&](int step, int h, int tile) {
    if (step % kAdders != adder) return;
    const uint64_t at = here.query_tile(args, h, tile);
    float* sums = args.dq.sums + at * (C::kTileQ * C::kHeadDim);
    const int turn = here.turn(args, tile);
    const bool in_turn = args.p.deterministic && wanted, first = in_turn && turn == 0;
    if (in_turn) {
      while (ptx::load_acquire(args.dq.turns + at) != turn) {
      }
      ptx::fence_proxy_async_global();
    }
    for (int half = 0; half < kConsumers; ++half) {
      ptx::mbarrier_wait(smem.dq_full[adder][half], step / kAdders & 1);
      float* to = sums + half * (kBytes / sizeof(float));
      if (first)
        ptx::store_bytes(to, ptx::smem_addr(smem.dq[half]), kBytes);
      else if (wanted)
        ptx::add_floats(to, ptx::smem_addr(smem.dq[half]), kBytes);
      ptx::bulk_commit_group();
    }
    ptx::bulk_wait_read();
    for (int half = 0; half < kConsumers; ++half) ptx::mbarrier_arrive(smem.dq_empty[half]);
    if (in_turn) {
      ptx::bulk_wait();
      ptx::fence_proxy_async_global();
      ptx::add_release(args.dq.turns + at, 1);
    }
  });
  ptx::bulk_wait();
}

template <class C, class T, Recipe kRecipe>
__global__ void __launch_bounds__(kThreads, 1) backward_kernel(const __grid_constant__ BackwardArgs args) {
  extern __shared__ __align__(1024) unsigned char raw[];
  auto& smem = *reinterpret_cast<BackwardSmem<C, T>*>(raw);
  const int warpgroup =
      __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroup, 0);  // known to be the same in a warp
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(smem.kv_full, 1);
    for (int i = 0; i < C::kStages; ++i) {
      ptx::mbarrier_init(smem.q_full[i], 1), ptx::mbarrier_init(smem.q_empty[i], kConsumers * kWarpgroup);
      ptx::mbarrier_init(smem.grad_full[i], 1), ptx::mbarrier_init(smem.grad_empty[i], kConsumerWarps);
    }
    for (int i = 0; i < 2; ++i) ptx::mbarrier_init(smem.grad_scores_full[i], kConsumerWarps);
    for (int half = 0; half < kConsumers; ++half) {
      for (int adder = 0; adder < kAdders; ++adder)
        ptx::mbarrier_init(smem.dq_full[adder][half], kWarpgroup / 32);
      ptx::mbarrier_init(smem.dq_empty[half], 1);
    }
    ptx::fence_mbarrier_init();
  }
  // Step 0 multiplies the dS of a step before it, and drops the result.
  for (int i = threadIdx.x; i < static_cast<int>(sizeof(smem.grad_scores[1]) / sizeof(uint4)); i += kThreads)
    reinterpret_cast<uint4*>(smem.grad_scores[1])[i] = uint4{};
  ptx::fence_proxy_async();
  __syncthreads();
  const BackwardPlace<C> here(args, blockIdx.x);
  if (warpgroup == 0) {
    ptx::give_registers<kProducerRegisters>();
    const int warp = threadIdx.x / 32;
    if (threadIdx.x % 32 != 0) return;
    if (warp == 0)
      backward_produce<C, T>(args, smem, here);
    else if (warp <= kAdders)
      backward_add<C, T>(args, smem, here, warp - 1);
  } else {
    ptx::take_registers<kConsumerRegisters>();
    backward_consume<C, T, kRecipe>(args, smem, here, warpgroup - 1);
  }
}

template <class C, class T, Recipe kRecipe>
cudaError_t launch(const BackwardParams& p, const RowGroupStatistics* statistics, const GradQuery& dq,
                   cudaStream_t stream) {
  const AttentionShape& s = p.shape;
  BackwardArgs args{};
  args.p = p, args.statistics = statistics, args.dq = dq;
  args.tiles_q = static_cast<int>((s.seq_q + C::kTileQ - 1) / C::kTileQ);
  args.tiles_k = static_cast<int>((s.seq_k + C::kTileK - 1) / C::kTileK);
  args.heads_together = std::max(kBlocksTogether / args.tiles_k, 1);
  args.scale_log2 = scale_log2(p.softmax_scale);
  cudaError_t status = cudaSuccess;
  const auto map = [&](CUtensorMap* to, const View& x, int64_t heads, int64_t rows, int box_rows,
                       DType dtype) {
    if (status == cudaSuccess) status = rows_map(to, x, s.batch, heads, rows, s.head_dim, box_rows, dtype);
  };
  map(&args.q, p.q, s.heads_q, s.seq_q, C::kTileQ, DType::kBFloat16);
  map(&args.grad_out, p.grad_out, s.heads_q, s.seq_q, C::kTileQ, p.dtype);
  map(&args.k, p.k, s.heads_kv, s.seq_k, C::kTileK, DType::kBFloat16);
  map(&args.v, p.v, s.heads_kv, s.seq_k, C::kTileK, p.dtype);
  if (status != cudaSuccess) return status;
  return launch_tiles<BackwardSmem<C, T>>(backward_kernel<C, T, kRecipe>, args,
                                          args.tiles_k * s.batch * s.heads_kv, stream);
}

template <class C, class T>
cudaError_t launch_recipe(const BackwardParams& p, const RowGroupStatistics* statistics, const GradQuery& dq,
                          cudaStream_t stream) {
  switch (p.recipe) {
    case Recipe::kCudnn: return launch<C, T, Recipe::kCudnn>(p, statistics, dq, stream);
    case Recipe::kFp4: return launch<C, T, Recipe::kFp4>(p, statistics, dq, stream);
    case Recipe::kFp4Qk: return launch<C, T, Recipe::kFp4Qk>(p, statistics, dq, stream);
  }
  return cudaErrorInvalidValue;
}

template <class T>
cudaError_t launch_head_dim(const BackwardParams& p, const RowGroupStatistics* statistics,
                            const GradQuery& dq, cudaStream_t stream) {
  if (p.shape.head_dim == 64) return launch_recipe<BackwardConfig<64>, T>(p, statistics, dq, stream);
  return launch_recipe<BackwardConfig<128>, T>(p, statistics, dq, stream);
}

}  // namespace

cudaError_t launch_backward(const BackwardParams& p, const RowGroupStatistics* statistics,
                            const GradQuery& dq, cudaStream_t stream) {
  return p.dtype == DType::kFloat16 ? launch_head_dim<__half>(p, statistics, dq, stream)
                                    : launch_head_dim<__nv_bfloat16>(p, statistics, dq, stream);
}

}  // namespace attn_qat::sm90
