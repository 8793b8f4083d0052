// A consumer warpgroup of the forward: its 64 query rows, and the steps it takes for each tile of keys.
#pragma once
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/special_registers.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/sm90/forward_registers.cuh"

namespace attn_qat::sm90 {

template <class C, class T, Recipe kRecipe, bool kTraining>
struct ForwardConsumer {
  using Registers = ForwardRegisters<C, T, kRecipe, kTraining>;
  using Scores = float[Registers::kNTiles][4];
  using Maxima = float[2][Registers::kBlocks];
  using Packed = typename Registers::Packed;
  using Sums = float[1][4];
  // With two blocks to a row the products of the first start before the softmax of the second.
  static constexpr bool kHalves = Registers::kBlocks == 2, kTakesTurns = !kHalves || C::kHeadDim == 64;

  const ForwardArgs& args;
  ForwardSmem<C, T>& smem;
  const ForwardPlace<C>& here;
  const int consumer;
  Registers& own;
  __device__ int row_in_tile() const { return consumer * kWarpgroupRows; }  // this warpgroup's first
  const int seq_k = static_cast<int>(args.p.shape.seq_k);
  const int all_visible =
      args.p.causal ? min(here.first_row + row_in_tile() + 1 + here.offset, seq_k) : seq_k;
  const uint64_t q = columns_operand(smem.q, row_in_tile());

  // Found anew where it is needed: in a register it would be one too many.
  __device__ static int consumer_again() { return static_cast<int>(ptx::tid_x() / kWarpgroup) - 1; }
  __device__ static void wait_for_turn() {
    ptx::named_barrier_sync<kConsumers * kWarpgroup>(kTurnBarrier + consumer_again());
  }
  __device__ static void pass_turn() {
    ptx::named_barrier_arrive<kConsumers * kWarpgroup>(kTurnBarrier + (consumer_again() ^ 1));
  }
  __device__ static void release(uint64_t& empty) {
    __syncwarp();
    if (ptx::laneid() == 0) ptx::mbarrier_arrive(empty);
  }

  __device__ __forceinline__ void start_scores(int use, Scores& s) {
    const int stage = stage_of<C::kStages>(use);
    ptx::mbarrier_wait(smem.k_full[stage], parity_of<C::kStages>(use));
    ptx::wgmma_fence();
    multiply_transposed<C::kHeadDim, C::kTileQ, C::kTileK>(s, q, columns_operand(smem.k[stage]), Quantized{});
    ptx::wgmma_commit_group();
  }

  // S of tile j, masked.
  __device__ __forceinline__ void finish_scores(int j, int use, Scores& s) {
    ptx::wgmma_wait_group<0>();
    ptx::hold(s);
    release(smem.k_empty[stage_of<C::kStages>(use)]);
    const int from = j * C::kTileK;
    if (from > all_visible - C::kTileK) {
      const ForwardPlace<C> place(args, ptx::ctaid_x());
      const int row =
          place.first_row + row_in_tile() + threadIdx.x % kWarpgroup / 32 * 16 + ptx::laneid() / 4;
      const int end = static_cast<int>(args.p.shape.seq_k) - from, diagonal = row + 1 + place.offset - from;
      own.mask(s, {args.p.causal ? min(end, diagonal) : end, args.p.causal ? min(end, diagonal + 8) : end});
    }
  }

  // Products with V of 16-key steps kFrom to kTo - 1; after the last, row sums of p as the products see it.
  template <int kFrom, int kTo>
  __device__ __forceinline__ void start_outputs(uint64_t values, const Packed& packed,
                                                const Packed& quantized, Sums& sums) {
    ptx::wgmma_fence();
    if constexpr (Registers::kHighPrecision)
      multiply_add<kFrom, kTo>(own.high_precision_out, packed, values, T{});
    if constexpr (Registers::kQuantizes) multiply_add<kFrom, kTo>(own.out, quantized, values, T{});
    if constexpr (Registers::kHighPrecision && !Registers::kSumsInOutput && kTo == Registers::kKeySteps) {
#pragma unroll
      for (int step = 0; step < kTo; ++step)
        ptx::wgmma<0>(sums, packed[step], columns_operand(smem.v[0].ones), step > 0, T{});
    }
    ptx::wgmma_commit_group();
  }

  __device__ __forceinline__ void finish_outputs(int stage, Sums& sums) {
    ptx::wgmma_wait_group<0>();
    if constexpr (Registers::kHighPrecision) ptx::hold(own.high_precision_out);
    if constexpr (Registers::kHighPrecision && !Registers::kSumsInOutput) {
      ptx::hold(sums);
      own.own_rounded_sum[0] += sums[0][0], own.own_rounded_sum[1] += sums[0][2];
    }
    if constexpr (Registers::kQuantizes) ptx::hold(own.out);
    release(smem.v_empty[stage]);
  }
};

template <class C, class T, Recipe kRecipe, bool kTraining>
__device__ __forceinline__ void forward_consume(const ForwardArgs& args, ForwardSmem<C, T>& smem,
                                                const ForwardPlace<C>& here, int consumer) {
  using Consumer = ForwardConsumer<C, T, kRecipe, kTraining>;
  using Registers = typename Consumer::Registers;
  constexpr bool kTwoPasses = kRecipe == Recipe::kCudnn, kTakesTurns = Consumer::kTakesTurns;
  Registers own;
  Consumer role{args, smem, here, consumer, own};

  ptx::mbarrier_wait(smem.q_full, 0);
  if constexpr (kTwoPasses)  // the first finds the exponents
    for (int j = 0; j < here.tiles_k; ++j) {
      typename Consumer::Scores s;
      typename Consumer::Maxima block_max;
      role.start_scores(j, s);
      role.finish_scores(j, j, s);
      own.block_maxima(s, args.scale_log2, block_max);
      own.raise_exponents(block_max);
    }
  if (kTakesTurns && consumer == 1 && here.tiles_k > 0)
    ptx::named_barrier_arrive<kConsumers * kWarpgroup>(kTurnBarrier);
  for (int j = 0; j < here.tiles_k; ++j) {
    typename Consumer::Scores s;
    typename Consumer::Maxima block_max;
    if (kTakesTurns && j == 0) role.wait_for_turn();
    const int use = kTwoPasses ? here.tiles_k + j : j;
    role.start_scores(use, s);
    if (kTakesTurns) role.pass_turn();
    role.finish_scores(j, use, s);
    own.block_maxima(s, args.scale_log2, block_max);
    if constexpr (!kTwoPasses) own.raise_exponents(block_max);

    constexpr int kSteps = Registers::kKeySteps, kFirst = Consumer::kHalves ? kSteps / 2 : 0;
    typename Consumer::Packed packed, quantized;
    typename Consumer::Sums sums;
    const int stage = stage_of<C::kStages>(j);
    const uint64_t values = rows_operand<C::kTileK>(smem.v[stage].values);
    const auto boundary = [&] {  // long done: the compiler moves nothing across
      ptx::mbarrier_wait(smem.v_full[stage_of<C::kStages>(j)], parity_of<C::kStages>(j));
    };
    own.template probabilities<0>(s, args.scale_log2, block_max, packed, quantized, boundary);
    ptx::mbarrier_wait(smem.v_full[stage], parity_of<C::kStages>(j));
    if (kTakesTurns) role.wait_for_turn();
    if constexpr (Consumer::kHalves) role.template start_outputs<0, kFirst>(values, packed, quantized, sums);
    if constexpr (Registers::kBlocks > 1)
      own.template probabilities<1>(s, args.scale_log2, block_max, packed, quantized, boundary);
    role.template start_outputs<kFirst, kSteps>(values, packed, quantized, sums);
    if (kTakesTurns && j + 1 == here.tiles_k && consumer == 0) role.pass_turn();
    role.finish_outputs(stage, sums);
  }
  const ForwardPlace<C> place(args, ptx::ctaid_x());
  own.store(args.p, place, place.first_row + consumer * kWarpgroupRows);
}

}  // namespace attn_qat::sm90
