// What a forward thread block works with: arguments, shared memory, and its tile.
#pragma once
#include <cuda.h>

#include <cstdint>

#include "cuda/sm90/config.cuh"
#include "cuda/sm90/kernels.h"
#include "cuda/sm90/tile.cuh"

namespace attn_qat::sm90 {

struct ForwardArgs {
  CUtensorMap q, k, v;
  ForwardParams p;
  int tiles_q;
  int key_boxes;     // of 64 keys, for each kv head: where keys are interleaved
  float scale_log2;  // softmax_scale * log2 e
};

// A tile of V^, and to its right 64 columns of ones: P times it, eight columns wider than V^, gives row sums too.
template <class C, class T>
struct ValueTile {
  T values[C::kTileK * C::kHeadDim];
  T ones[C::kTileK * kPanelColumns];
};

template <class C, class T>
struct ForwardSmem {
  alignas(1024) Quantized q[C::kTileQ * C::kHeadDim];
  alignas(1024) Quantized k[C::kStages][C::kTileK * C::kHeadDim];
  alignas(1024) ValueTile<C, T> v[C::kStages];
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

}  // namespace attn_qat::sm90
