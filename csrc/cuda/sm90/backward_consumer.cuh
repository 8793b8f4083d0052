// A consumer warpgroup of the fused backward: its 64 keys, and the parts of a step (backward.cu draws one).
#pragma once
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/special_registers.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/sm90/backward_registers.cuh"

namespace attn_qat::sm90 {

template <class C, class T, Recipe kRecipe>
struct BackwardConsumer {
  using Registers = BackwardRegisters<C, T, kRecipe>;
  using Scores = typename Registers::Scores;
  using Packed = typename Registers::Packed;
  using HalfDq = float[8][4];
  static constexpr int kNTiles = Registers::kNTiles;
  // Half of dQ: 64 of its columns, or at head dimension 64 half of its rows.
  static constexpr bool kSplitColumns = C::kHeadDim == 128;

  const BackwardArgs& args;
  BackwardSmem<C, T>& smem;
  const BackwardPlace<C>& here;
  const int consumer;
  Registers& own;
  typename Registers::Exponents& exponents;
  const int key_in_tile = consumer * kWarpgroupRows;  // this warpgroup's first
  const uint64_t k{columns_operand(smem.k, key_in_tile)}, v{columns_operand(smem.v, key_in_tile)},
      k_rows{rows_operand<C::kTileK>(reinterpret_cast<const char*>(smem.k) +
                                     (kSplitColumns ? consumer * panel_bytes(C::kTileK) : 0))};
  const int keys_here = static_cast<int>(args.p.shape.seq_k) - here.first_key;
  float* const scratch = smem.reciprocals[threadIdx.x / 32 - kWarpgroup / 32];

  __device__ static uint32_t parity_of(int step) { return static_cast<uint32_t>(step / C::kStages & 1); }

  __device__ __forceinline__ void start_scores(int step, Scores& s) {
    const int stage = step % C::kStages;
    ptx::mbarrier_wait(smem.q_full[stage], parity_of(step));
    exponents.load(smem.statistics[stage]);
    ptx::wgmma_fence();
    multiply_transposed<C::kHeadDim, C::kTileK, C::kTileQ>(s, k, columns_operand(smem.q[stage]), Quantized{});
    ptx::wgmma_commit_group();
  }

  // dp = -delta of its column: ones times the three parts of it. The eight columns to their right are the same ones
  // again, and multiplied by 0.
  __device__ __forceinline__ void subtract_delta(const RowGroupStatistics* statistics, Scores& dp) {
    const int column = ptx::laneid() % 4 * 2;
    const uint32_t ones = column == 0 ? 0x3f803f80u : column == 2 ? 0x3f80u : 0u;
    const uint32_t a[4] = {ones, ones, 0, 0};
    ptx::wgmma<0>(dp, a,
                  ptx::smem_descriptor_unswizzled(ptx::smem_addr(statistics[0].minus_delta).bits, 0,
                                                  sizeof(RowGroupStatistics)),
                  false, __nv_bfloat16{});
  }

  __device__ __forceinline__ void start_grad_probabilities(int step, Scores& dp) {
    const int stage = step % C::kStages;
    ptx::mbarrier_wait(smem.grad_full[stage], parity_of(step));
    ptx::wgmma_fence();
    subtract_delta(smem.statistics[stage], dp);
    multiply_transposed<C::kHeadDim, C::kTileK, C::kTileQ, true>(dp, v, columns_operand(smem.grad_out[stage]),
                                                                 T{});
    ptx::wgmma_commit_group();
  }

  // s has arrived, dp not yet: s becomes p, dS is packed.
  __device__ __forceinline__ void softmax(int step, int tile, Scores& s, Scores& dp, Packed& packed) {
    const int stage = step % C::kStages;
    const int diagonal = args.p.causal ? here.first_key - here.offset - tile * C::kTileQ : -C::kTileK;
    if (diagonal > 1 - C::kTileK || keys_here < C::kTileK) {
      const int key = key_in_tile + threadIdx.x % kWarpgroup / 32 * 16 + ptx::laneid() / 4;
      own.mask(s, {key < keys_here ? diagonal + key : C::kTileQ,
                   key + 8 < keys_here ? diagonal + key + 8 : C::kTileQ});
    }
    own.probabilities(exponents, args.scale_log2, s);
    ptx::hold(s);
    // Both waits are for what is long complete: the compiler moves nothing across.
    if constexpr (C::kHeadDim == 64) ptx::mbarrier_wait(smem.grad_full[stage], parity_of(step));
    typename Registers::Maxima top;
    if constexpr (Registers::kQuantizes) {
      own.maxima(s, top);
      own.template halve<Registers::kColumns / 2, 16>(top);
    }
    ptx::mbarrier_wait(smem.grad_full[stage], parity_of(step));
    ptx::wgmma_wait_group<0>();
    ptx::hold(dp);
    own.template grad_scores<0, kNTiles / 2>(smem.statistics[stage], s, dp, packed);
    if constexpr (Registers::kQuantizes) own.template halve<Registers::kColumns / 4, 8>(top);
    own.template grad_scores<kNTiles / 2, kNTiles>(smem.statistics[stage], s, dp, packed);
    if constexpr (Registers::kQuantizes) {
      own.template halve<Registers::kColumns / 8, 4>(top);
      own.share_reciprocals(smem.statistics[stage], top, scratch);
    }
  }

  __device__ __forceinline__ void start_dq(int step, HalfDq& dq) {
    ptx::wgmma_fence();
    multiply<C::kTileK / 16, C::kTileQ>(
        dq, columns_operand(smem.grad_scores[step & 1], kSplitColumns ? 0 : consumer * kWarpgroupRows),
        k_rows, Quantized{});
    ptx::wgmma_commit_group();
  }

  __device__ __forceinline__ void stage_dq(int step, const HalfDq& dq) {
    ptx::mbarrier_wait(smem.dq_empty[consumer], (step & 1) ^ 1);
    own.store_dq(smem.dq[consumer], dq);
  }

  // Starts dK, dQ of the step before, and dV.
  __device__ __forceinline__ void start_outputs(int step, Scores& s, const Packed& packed, HalfDq& dq) {
    const int stage = step % C::kStages;
    ptx::wgmma_fence();
    multiply_add(own.dk, packed, rows_operand<C::kTileQ>(smem.q[stage]), Quantized{});
    ptx::wgmma_commit_group();
    // The buffer is free, and the other one complete.
    if (step > 0) ptx::mbarrier_wait(smem.grad_scores_full[(step - 1) % 2], (step - 1) / 2 & 1);
    own.store_grad_scores(
        {ptx::smem_addr(smem.grad_scores[step % 2]).bits + consumer * panel_bytes(C::kTileQ)}, packed);
    start_dq(step - 1, dq);
    Packed quantized;
    own.probability_operand(scratch, s, quantized);
    ptx::wgmma_fence();
    multiply_add(own.dv, quantized, rows_operand<C::kTileQ>(smem.grad_out[stage]), T{});
    ptx::wgmma_commit_group();
  }

  // dK and dQ have arrived.
  __device__ __forceinline__ void finish_dk_dq(int step, HalfDq& dq) {
    ptx::hold(dq);
    ptx::hold(own.dk);
    ptx::mbarrier_arrive(smem.q_empty[step % C::kStages]);
    if (step > 0) stage_dq(step - 1, dq);
  }

  // dV has arrived.
  __device__ __forceinline__ void finish_dv(int step) {
    ptx::hold(own.dv);
    ptx::fence_proxy_async();  // for dS and dQ, late: their stores have long arrived
    __syncwarp();
    if (ptx::laneid() == 0) {
      ptx::mbarrier_arrive(smem.grad_empty[step % C::kStages]);
      ptx::mbarrier_arrive(smem.grad_scores_full[step % 2]);
      if (step > 0) ptx::mbarrier_arrive(smem.dq_full[(step - 1) % kAdders][consumer]);
    }
  }

  // dQ of the last step, which no later one multiplies.
  __device__ __forceinline__ void finish_last_dq(int last, HalfDq& dq) {
    ptx::mbarrier_wait(smem.grad_scores_full[last % 2], last / 2 & 1);
    start_dq(last, dq);
    ptx::wgmma_wait_group<0>();
    ptx::hold(dq);
    stage_dq(last, dq);
    ptx::fence_proxy_async();
    __syncwarp();
    if (ptx::laneid() == 0) ptx::mbarrier_arrive(smem.dq_full[last % kAdders][consumer]);
  }

  __device__ __forceinline__ void store() const {
    if (!args.p.dk.data) return;
    const BackwardPlace<C> place(args, ptx::ctaid_x());  // anew: kept through the loop it would spill
    const int first_row = place.first_key + key_in_tile;
    const AttentionShape& shape = args.p.shape;
    const float dk_scale[2] = {args.p.softmax_scale, args.p.softmax_scale},
                dv_scale[2] = {1.0f / Registers::kLeftInDv, 1.0f / Registers::kLeftInDv};
    store_rows<C::kHeadDim, T>(args.p.dk, place.b, place.h_kv, first_row, shape.seq_k, own.dk, dk_scale);
    store_rows<C::kHeadDim, T>(args.p.dv, place.b, place.h_kv, first_row, shape.seq_k, own.dv, dv_scale);
  }
};

template <class C, class T, Recipe kRecipe>
__device__ __forceinline__ void backward_consume(const BackwardArgs& args, BackwardSmem<C, T>& smem,
                                                 const BackwardPlace<C>& here, int consumer) {
  using Consumer = BackwardConsumer<C, T, kRecipe>;
  typename Consumer::Registers own;
  typename Consumer::Registers::Exponents exponents;
  Consumer role{args, smem, here, consumer, own, exponents};
  int last = 0;
  ptx::mbarrier_wait(smem.kv_full, 0);
  here.for_each_tile(args.tiles_q, [&](int step, int, int tile) {
    typename Consumer::Scores s, dp;
    typename Consumer::Packed packed;
    typename Consumer::HalfDq dq;
    role.start_scores(step, s);
    role.start_grad_probabilities(step, dp);
    ptx::wgmma_wait_group<1>();
    ptx::hold(s);
    role.softmax(step, tile, s, dp, packed);
    role.start_outputs(step, s, packed, dq);
    ptx::wgmma_wait_group<1>();
    role.finish_dk_dq(step, dq);
    ptx::wgmma_wait_group<0>();
    role.finish_dv(step);
    last = step;
  });
  typename Consumer::HalfDq dq;
  role.finish_last_dq(last, dq);
  role.store();
}

}  // namespace attn_qat::sm90
