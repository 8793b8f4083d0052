// The fused backward's arguments, shared memory and barriers, and which thread block does what in which order.
#pragma once
#include <cstdint>
#include <type_traits>

#include "cuda/sm90/kernels.h"
#include "cuda/sm90/tile.cuh"

namespace attn_qat::sm90 {

struct BackwardArgs {
  CUtensorMap q, k, v, grad_out;
  BackwardParams p;
  const RowGroupStatistics* statistics;  // [B, Hq, tiles_q * kTileQ / 8], zero past the end
  GradQuery dq;
  int tiles_q, tiles_k, heads_together;
  float scale_log2;
};

// Thread blocks start kv tile by kv tile of so many blocks' worth of heads. A query tile takes dQ from one kv tile after
// the other: were the kv tiles of a head to start all at once, each would wait for those before it. On an H200 (132
// multiprocessors) 256 was within 3% of the best tried at every length from 2,048 to 31,200 keys.
inline constexpr int kBlocksTogether = 256;

inline constexpr int kAdders = 2;  // warps that add dQ to global memory, taking turns

template <class C, class T>
struct BackwardSmem {
  alignas(1024) Quantized k[C::kTileK * C::kHeadDim];
  alignas(1024) T v[C::kTileK * C::kHeadDim];
  alignas(1024) Quantized q[C::kStages][C::kTileQ * C::kHeadDim];
  alignas(1024) T grad_out[C::kStages][C::kTileQ * C::kHeadDim];
  alignas(1024) Quantized grad_scores[2][C::kTileQ * C::kTileK];  // rows are queries; used in turn
  alignas(128) float dq[kConsumers][C::kTileQ * C::kHeadDim / kConsumers];
  alignas(128) RowGroupStatistics statistics[C::kStages][C::kTileQ / RowGroupStatistics::kRows];
  alignas(16) float reciprocals[kConsumerWarps][C::kTileQ];  // of a warp's scales of P^, one a query
  // full: one arrival, the producer's, and the bytes. empty: one arrival a consumer warp; for q a consumer thread, since
  // each has read statistics by itself.
  uint64_t kv_full, q_full[C::kStages], q_empty[C::kStages], grad_full[C::kStages], grad_empty[C::kStages];
  // One arrival a consumer warp, late in a step: it has stored its part of that step's dS, and no longer reads that of
  // the step before.
  uint64_t grad_scores_full[2];
  // full: one arrival a warp of that consumer; one barrier for each adder. empty: the adder's arrival.
  uint64_t dq_full[kAdders][kConsumers], dq_empty[kConsumers];
};

// P is of the order 1 / S: FP16 holds it with this gain, taken back from dV.
template <class T>
inline constexpr float kDvGain = std::is_same_v<T, __half> ? 0x1p14f : 1.0f;

// The keys of a thread block, and the query tiles that see them: of `heads` heads, from first_tile on.
template <class C>
struct BackwardPlace {
  int b, h_kv, h_first, heads, tile_k, first_key, offset, first_tile;

  __device__ BackwardPlace(const BackwardArgs& args, uint32_t block) {
    const AttentionShape& shape = args.p.shape;
    const auto tiles_k = static_cast<uint32_t>(args.tiles_k),
               heads_kv = static_cast<uint32_t>(shape.heads_kv),
               together = static_cast<uint32_t>(args.heads_together);
    const uint32_t first_head = block / (together * tiles_k) * together,
                   heads_here = min(together, static_cast<uint32_t>(shape.batch) * heads_kv - first_head),
                   place = block - first_head * tiles_k, head = first_head + place % heads_here;
    tile_k = place / heads_here;
    if (in_descending_turns(args)) tile_k = tiles_k - 1 - tile_k;
    b = head / heads_kv, h_kv = head % heads_kv;
    heads = static_cast<uint32_t>(shape.heads_q) / heads_kv, h_first = h_kv * heads;
    first_key = tile_k * C::kTileK, offset = static_cast<int>(shape.seq_k - shape.seq_q);
    first_tile = args.p.causal ? max(first_key - offset, 0) / C::kTileQ : 0;
  }

  // Under a causal mask the last kv tile that a query tile sees adds first: every block then starts where it is first.
  __device__ static bool in_descending_turns(const BackwardArgs& args) {
    return args.p.causal && args.p.deterministic;
  }
  // How many kv tiles add to a query tile before this one.
  __device__ int turn(const BackwardArgs& args, int tile) const {
    if (!in_descending_turns(args)) return tile_k;
    return min(((tile + 1) * C::kTileQ - 1 + offset) / C::kTileK, args.tiles_k - 1) - tile_k;
  }

  // Index of a query tile among those of all heads: there are fewer than 2^31.
  __device__ uint64_t query_tile(const BackwardArgs& args, int head, int tile) const {
    const auto heads_q = static_cast<uint32_t>(args.p.shape.heads_q);
    return (b * heads_q + head) * static_cast<uint32_t>(args.tiles_q) + tile;
  }

  // Calls body(step, head, tile) for every query tile in order.
  template <class Body>
  __device__ __forceinline__ void for_each_tile(int tiles_q, Body body) const {
    int step = 0;
    for (int h = h_first; h < h_first + heads; ++h)
      for (int tile = first_tile; tile < tiles_q; ++tile) body(step++, h, tile);
  }
};

}  // namespace attn_qat::sm90
