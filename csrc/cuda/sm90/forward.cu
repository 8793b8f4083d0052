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
// Recipe cudnn quantises against the final E (contract section 2): a first pass over K^ finds it.
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "cuda/ptx/bulk.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/sm90/kernels.h"
#include "cuda/sm90/launch.cuh"
#include "cuda/sm90/tile.cuh"
#include "cuda/tile/probability_quantizer.cuh"

namespace attn_qat::sm90 {
namespace {

struct ForwardArgs {
  CUtensorMap q, k, v;
  ForwardParams p;
  int tiles_q;
  int key_boxes;     // of 64 keys, for each kv head: where keys are interleaved
  float scale_log2;  // softmax_scale * log2 e
};

template <class C, class T>
struct ForwardSmem {
  alignas(1024) Quantized q[C::kTileQ * C::kHeadDim];
  alignas(1024) Quantized k[C::kStages][C::kTileK * C::kHeadDim];
  alignas(1024) T v[C::kStages][C::kTileK * C::kHeadDim];
  alignas(1024) T ones[8 * kPanelColumns];  // right operand of row sums
  // full: one arrival, the producer's, and the bytes. empty: one arrival a consumer warp.
  uint64_t q_full, k_full[C::kStages], k_empty[C::kStages], v_full[C::kStages], v_empty[C::kStages];
};

// The tile of a thread block and what it sees.
template <class C>
struct ForwardPlace {
  int b, h, h_kv, first_row, offset, tiles_k;

  __device__ ForwardPlace(const ForwardArgs& args, uint32_t block) {
    const AttentionShape& shape = args.p.shape;
    const auto tiles_q = static_cast<uint32_t>(args.tiles_q), heads_q = static_cast<uint32_t>(shape.heads_q);
    // The last query tiles see the most keys under a causal mask: they start first.
    const uint32_t head = block / tiles_q, tile_q = tiles_q - 1 - block % tiles_q;
    b = head / heads_q, h = head % heads_q, h_kv = h / (heads_q / static_cast<uint32_t>(shape.heads_kv));
    first_row = tile_q * C::kTileQ;
    const int seq_q = static_cast<int>(shape.seq_q), seq_k = static_cast<int>(shape.seq_k);
    offset = seq_k - seq_q;
    const int last_row = min(first_row + C::kTileQ, seq_q) - 1;
    const int keys = args.p.causal ? max(last_row + 1 + offset, 0) : seq_k;
    tiles_k = (keys + C::kTileK - 1) / C::kTileK;
  }
};

// The i-th use of a ring of stages: which one, and the parity of its phase.
template <int kStages>
__device__ __forceinline__ int stage_of(int i) {
  return i % kStages;
}
template <int kStages>
__device__ __forceinline__ uint32_t parity_of(int i) {
  return i / kStages & 1;
}

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
    load_keys(smem.v[stage], args.v, smem.v_full[stage], j);
  }
}

constexpr float kNegativeInfinity = -__builtin_inff();
constexpr float kNoExponent =
    -3.402823466e38f;  // of a row that has seen no key: finite, so that exp2(-inf - E) is 0

template <class C, class T, Recipe kRecipe, bool kTraining>
struct ForwardConsumer {
  static constexpr int kNTiles = C::kTileK / 8, kDTiles = C::kHeadDim / 8, kKeySteps = C::kTileK / 16;
  static constexpr bool kQuantizes = kRecipe != Recipe::kFp4Qk;
  static constexpr bool kHighPrecision = kTraining || !kQuantizes;  // P itself is multiplied
  static constexpr int kBlocks = kQuantizes ? C::kTileK / 64 : 1;   // of 16 keys, of a thread's row
  using Packed = uint32_t[kKeySteps][4];

  float out[kQuantizes ? kDTiles : 1][4], high_precision_out[kHighPrecision ? kDTiles : 1][4];
  float exponent[2], row_sum[2];
  // Row sums of p as the products see it, rounded: what O_hp is divided by, so that a row of one key gives V
  // itself and delta carries no bias. lse and O take row_sum, of p before rounding.
  float rounded_sum[2];

  __device__ ForwardConsumer() {
    zero(high_precision_out);
    zero(out);
    exponent[0] = exponent[1] = kNoExponent;
    row_sum[0] = row_sum[1] = rounded_sum[0] = rounded_sum[1] = 0.0f;
  }

  // Key of column 8 j + 2 (lane % 4) + e of S, but for what the lane adds.
  __host__ __device__ static constexpr int key_of(int j, int e) {
    return kQuantizes ? j / 8 * 64 + j % 8 * 2 + e : 8 * j + e;
  }
  __device__ static int first_key() { return ptx::laneid() % 4 * (kQuantizes ? 16 : 2); }

  // Row half r does not see keys from limit[r] on.
  __device__ void mask(float (&s)[kNTiles][4], const int (&limit)[2]) const {
    const int first = first_key(), end[2] = {limit[0] - first, limit[1] - first};
#pragma unroll
    for (int j = 0; j < kNTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (key_of(j, e % 2) >= end[e / 2]) s[j][e] = kNegativeInfinity;
  }

  // x[0] becomes the largest of the first kCount.
  template <int kCount, int kSize>
  __device__ static void top_of(float (&x)[kSize]) {
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) x[i] = fmaxf(x[i], x[i + kCount / 2]);
    if constexpr (kCount > 2) top_of<kCount / 2>(x);
  }

  // Largest t = scale s of this thread's blocks in each row.
  __device__ void block_maxima(const float (&s)[kNTiles][4], float scale_log2,
                               float (&block_max)[2][kBlocks]) const {
    constexpr int kTiles = kNTiles / kBlocks;
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        float top[kTiles];  // a tree: fmaxf in a row would wait for itself
#pragma unroll
        for (int j = 0; j < kTiles; ++j)
          top[j] = fmaxf(s[block * kTiles + j][2 * r], s[block * kTiles + j][2 * r + 1]);
        top_of<kTiles>(top);
        block_max[r][block] = __fmul_rn(top[0], scale_log2);
      }
  }

  // Takes a tile into the exponents; what was summed so far follows by an exact 2^n.
  __device__ void raise_exponents(const float (&block_max)[2][kBlocks]) {
    bool grew = false;
    float next[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = block_max[r][0];
#pragma unroll
      for (int block = 1; block < kBlocks; ++block) top = fmaxf(top, block_max[r][block]);
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
      next[r] = fmaxf(exponent[r], ceilf(top));
      grew |= next[r] != exponent[r];
    }
    if (kRecipe != Recipe::kCudnn && __any_sync(0xffffffffu, grew)) {  // cudnn: nothing is summed yet
#pragma unroll
      for (int r = 0; r < 2; ++r)
        rescale(r, next[r] == exponent[r] ? 1.0f : ptx::ex2_approx_ftz(exponent[r] - next[r]));
    }
    exponent[0] = next[0], exponent[1] = next[1];
  }

  __device__ void rescale(int r, float factor) {
#pragma unroll
    for (int i = 0; i < kDTiles; ++i)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if constexpr (kHighPrecision) high_precision_out[i][2 * r + e] *= factor;
        if constexpr (kQuantizes) out[i][2 * r + e] *= factor;
      }
    row_sum[r] *= factor, rounded_sum[r] *= factor;
  }

  // One block of s becomes p, packed as the left operands of p V^ and, quantised with a gain of 2^k left in, of P^ V^.
  template <int kBlock, class Boundary>
  __device__ void probabilities(float (&s)[kNTiles][4], float scale_log2,
                                const float (&block_max)[2][kBlocks], Packed& p, Packed& quantized,
                                Boundary boundary) {
    constexpr float kGain = kProbabilityGain<kRecipe>;
    constexpr int kTiles = kNTiles / kBlocks;
    tile::BlockScale scale[2];
    if constexpr (kQuantizes)
      for (int r = 0; r < 2; ++r)
        scale[r] = tile::block_scale(ptx::ex2_approx_ftz(block_max[r][kBlock] - exponent[r]), kGain);
#pragma unroll
    for (int j = kBlock * kTiles; j < (kBlock + 1) * kTiles; ++j) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float &p0 = s[j][2 * r], &p1 = s[j][2 * r + 1];
        p0 = ptx::ex2_approx_ftz(__fmul_rn(p0, scale_log2) - exponent[r]);
        p1 = ptx::ex2_approx_ftz(__fmul_rn(p1, scale_log2) - exponent[r]);
        row_sum[r] += p0;
        row_sum[r] += p1;
        if constexpr (kHighPrecision) p[j / 2][j % 2 * 2 + r] = tile::pack(p0, p1, T{});
        if constexpr (kQuantizes) {
          tile::quantize_pair_in_units(p0, p1, scale[r].reciprocal,
                                       scale[r].scale * (kGain * tile::kCodeUnit));
          quantized[j / 2][j % 2 * 2 + r] = tile::pack(p0, p1, T{});
        }
      }
      // Else the compiler would take up so much at once that registers spill.
      if (C::kHeadDim == 128 && kBlock == 0 && kBlocks > 1 && j % 2 == 1) boundary();
    }
  }

  __device__ void store(const ForwardParams& p, const ForwardPlace<C>& here, int first_row) const {
    constexpr float kInverseGain = 1.0f / kProbabilityGain<kRecipe>;
    const int lane = ptx::laneid();
    float out_scale[2], high_precision_scale[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = row_sum[r] + __shfl_xor_sync(0xffffffffu, row_sum[r], 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      const bool empty = sum == 0.0f;
      out_scale[r] = empty ? 0.0f : kInverseGain / sum;
      high_precision_scale[r] = empty ? 0.0f : 1.0f / rounded_sum[r];
      const int row = first_row + threadIdx.x % kWarpgroup / 32 * 16 + lane / 4 + 8 * r;
      if (lane % 4 != 0 || row >= p.shape.seq_q) continue;
      const int64_t at = (here.b * p.shape.heads_q + here.h) * p.shape.seq_q + row;
      if (p.lse) p.lse[at] = empty ? kNegativeInfinity : (exponent[r] + log2f(sum)) * 0.693147180559945f;
      if (p.row_exponent)
        p.row_exponent[at] = empty ? INT32_MIN : max(static_cast<int32_t>(exponent[r]), INT32_MIN + 1);
    }
    if constexpr (kTraining)
      store_rows<C::kHeadDim, T>(p.high_precision_out, here.b, here.h, first_row, p.shape.seq_q,
                                 high_precision_out, high_precision_scale);
    if constexpr (kQuantizes)
      store_rows<C::kHeadDim, T>(p.out, here.b, here.h, first_row, p.shape.seq_q, out, out_scale);
    else
      store_rows<C::kHeadDim, T>(p.out, here.b, here.h, first_row, p.shape.seq_q, high_precision_out,
                                 high_precision_scale);
  }
};

template <class C, class T, Recipe kRecipe, bool kTraining>
__device__ __forceinline__ void forward_consume(const ForwardArgs& args, ForwardSmem<C, T>& smem,
                                                const ForwardPlace<C>& here, int consumer) {
  using Consumer = ForwardConsumer<C, T, kRecipe, kTraining>;
  const ForwardParams& p = args.p;
  const int seq_k = static_cast<int>(p.shape.seq_k);
  const int all_visible =
      p.causal ? min(here.first_row + consumer * kWarpgroupRows + 1 + here.offset, seq_k) : seq_k;
  const uint64_t q = columns_operand(smem.q, consumer * kWarpgroupRows);
  const auto leader = [] { return ptx::laneid() == 0; };
  Consumer own;
  // With two blocks to a row the products of the first start before the softmax of the second.
  constexpr bool kHalves = Consumer::kBlocks == 2, kTakesTurns = !kHalves || C::kHeadDim == 64;
  // Found anew where it is needed: in a register it would be one too many.
  const auto consumer_again = [] { return static_cast<int>(ptx::tid_x() / kWarpgroup) - 1; };
  const auto start_scores = [&](int use, float (&s)[Consumer::kNTiles][4]) {
    const int stage = stage_of<C::kStages>(use);
    ptx::mbarrier_wait(smem.k_full[stage], parity_of<C::kStages>(use));
    ptx::wgmma_fence();
    multiply_transposed<C::kHeadDim, C::kTileQ, C::kTileK>(s, q, columns_operand(smem.k[stage]), Quantized{});
    ptx::wgmma_commit_group();
  };
  const auto finish_scores = [&](int j, int use, float (&s)[Consumer::kNTiles][4]) {
    ptx::wgmma_wait_group<0>();
    ptx::hold(s);
    __syncwarp();
    if (leader()) ptx::mbarrier_arrive(smem.k_empty[stage_of<C::kStages>(use)]);
    const int from = j * C::kTileK;
    if (from > all_visible - C::kTileK) {
      const ForwardPlace<C> place(args, ptx::ctaid_x());
      const int row = place.first_row + consumer * kWarpgroupRows + threadIdx.x % kWarpgroup / 32 * 16 +
                      ptx::laneid() / 4;
      const int end = static_cast<int>(p.shape.seq_k) - from, diagonal = row + 1 + place.offset - from;
      own.mask(s, {p.causal ? min(end, diagonal) : end, p.causal ? min(end, diagonal + 8) : end});
    }
  };

  ptx::mbarrier_wait(smem.q_full, 0);
  if constexpr (kRecipe == Recipe::kCudnn)
    for (int j = 0; j < here.tiles_k; ++j) {
      float s[Consumer::kNTiles][4], block_max[2][Consumer::kBlocks];
      start_scores(j, s);
      finish_scores(j, j, s);
      own.block_maxima(s, args.scale_log2, block_max);
      own.raise_exponents(block_max);
    }
  if (kTakesTurns && consumer == 1 && here.tiles_k > 0)
    ptx::named_barrier_arrive<kConsumers * kWarpgroup>(kTurnBarrier);
  for (int j = 0; j < here.tiles_k; ++j) {
    float s[Consumer::kNTiles][4], block_max[2][Consumer::kBlocks];
    if (kTakesTurns && j == 0)
      ptx::named_barrier_sync<kConsumers * kWarpgroup>(kTurnBarrier + consumer_again());
    const int use = kRecipe == Recipe::kCudnn ? here.tiles_k + j : j;
    start_scores(use, s);
    if (kTakesTurns)
      ptx::named_barrier_arrive<kConsumers * kWarpgroup>(kTurnBarrier + (consumer_again() ^ 1));
    finish_scores(j, use, s);
    own.block_maxima(s, args.scale_log2, block_max);
    if constexpr (kRecipe != Recipe::kCudnn) own.raise_exponents(block_max);
    typename Consumer::Packed packed, quantized;
    const auto boundary = [&] {  // long done: the compiler moves nothing across
      ptx::mbarrier_wait(smem.v_full[stage_of<C::kStages>(j)], parity_of<C::kStages>(j));
    };
    const int stage = stage_of<C::kStages>(j);
    const uint64_t values = rows_operand<C::kTileK>(smem.v[stage]);
    float sums[1][4];
    const auto start_outputs = [&](auto from, auto to) {
      constexpr int kFrom = decltype(from)::value, kTo = decltype(to)::value;
      ptx::wgmma_fence();
      if constexpr (Consumer::kHighPrecision)
        multiply_add<kFrom, kTo>(own.high_precision_out, packed, values, T{});
      if constexpr (Consumer::kQuantizes) multiply_add<kFrom, kTo>(own.out, quantized, values, T{});
      if constexpr (Consumer::kHighPrecision && kTo == Consumer::kKeySteps) {
#pragma unroll
        for (int step = 0; step < kTo; ++step)
          ptx::wgmma<0>(sums, packed[step], columns_operand(smem.ones), step > 0, T{});
      }
      ptx::wgmma_commit_group();
    };
    using std::integral_constant;
    constexpr int kSteps = Consumer::kKeySteps / Consumer::kBlocks;
    own.template probabilities<0>(s, args.scale_log2, block_max, packed, quantized, boundary);
    ptx::mbarrier_wait(smem.v_full[stage], parity_of<C::kStages>(j));
    if (kTakesTurns) ptx::named_barrier_sync<kConsumers * kWarpgroup>(kTurnBarrier + consumer_again());
    if constexpr (kHalves) start_outputs(integral_constant<int, 0>{}, integral_constant<int, kSteps>{});
    if constexpr (Consumer::kBlocks > 1)
      own.template probabilities<1>(s, args.scale_log2, block_max, packed, quantized, boundary);
    start_outputs(integral_constant<int, kHalves ? kSteps : 0>{},
                  integral_constant<int, Consumer::kKeySteps>{});
    if (kTakesTurns && j + 1 == here.tiles_k && consumer == 0)
      ptx::named_barrier_arrive<kConsumers * kWarpgroup>(kTurnBarrier + (consumer_again() ^ 1));
    ptx::wgmma_wait_group<0>();
    if constexpr (Consumer::kHighPrecision) {
      ptx::hold(own.high_precision_out);
      ptx::hold(sums);
      own.rounded_sum[0] += sums[0][0], own.rounded_sum[1] += sums[0][2];
    }
    if constexpr (Consumer::kQuantizes) ptx::hold(own.out);
    __syncwarp();
    if (leader()) ptx::mbarrier_arrive(smem.v_empty[stage]);
  }
  const ForwardPlace<C> place(args, ptx::ctaid_x());
  own.store(p, place, place.first_row + consumer * kWarpgroupRows);
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
  for (int i = threadIdx.x; i < 8 * kPanelColumns; i += kThreads) smem.ones[i] = T(1.0f);
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
  args.scale_log2 = p.softmax_scale * kLog2e;
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
