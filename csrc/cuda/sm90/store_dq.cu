// dQ = softmax_scale * the sums that the backward kernel left in the order of its accumulators. A thread takes the 64
// contiguous bytes of four lanes: eight columns of two rows.
#include <cuda_runtime.h>

#include "cuda/sm90/kernels.h"
#include "cuda/sm90/launch.cuh"
#include "cuda/tile/layout.cuh"

namespace attn_qat::sm90 {
namespace {

struct StoreArgs {
  View dq;
  GradQuery from;
  int64_t heads, seq;
  int tiles_q;  // of a head
  float scale;
  bool deterministic;
};

template <class C>
constexpr int kStoreThreads = C::kTileQ * C::kHeadDim / 16;  // one block for a tile

template <class C, class T>
__global__ void __launch_bounds__(kStoreThreads<C>) store_dq_kernel(const __grid_constant__ StoreArgs args) {
  constexpr int kLanes = 4;
  const int j = threadIdx.x % 8, row_pair = threadIdx.x / 8 % 8, warp = threadIdx.x / 64 % 4,
            half = threadIdx.x / 256;
  const int64_t head = blockIdx.x / args.tiles_q, b = head / args.heads, h = head - b * args.heads;
  const int tile = static_cast<int>(blockIdx.x - head * args.tiles_q);
  // Nothing was stored for a tile that sees no key.
  const bool empty = args.deterministic && args.from.turns[blockIdx.x] == 0;
  float4 x[kLanes] = {};
  if (!empty) {
    const auto* from = reinterpret_cast<const float4*>(args.from.sums) +
                       static_cast<int64_t>(blockIdx.x) * (C::kTileQ * C::kHeadDim / 4) +
                       (half * 8 + j) * kWarpgroup + warp * 32 + row_pair * kLanes;
#pragma unroll
    for (int i = 0; i < kLanes; ++i) x[i] = from[i];
  }
  constexpr bool kSplitColumns = C::kHeadDim == 128;
  const int column = 8 * j + (kSplitColumns ? half * 64 : 0);
  const int64_t row = int64_t{tile} * C::kTileQ + warp * 16 + row_pair + (kSplitColumns ? 0 : half * 64);
  T* to = static_cast<T*>(args.dq.data) + b * args.dq.stride_b + h * args.dq.stride_h + column;
  const float s = args.scale;
  if (row < args.seq)
    *reinterpret_cast<uint4*>(to + row * args.dq.stride_s) = {
        tile::pack(x[0].x * s, x[0].y * s, T{}), tile::pack(x[1].x * s, x[1].y * s, T{}),
        tile::pack(x[2].x * s, x[2].y * s, T{}), tile::pack(x[3].x * s, x[3].y * s, T{})};
  if (row + 8 < args.seq)
    *reinterpret_cast<uint4*>(to + (row + 8) * args.dq.stride_s) = {
        tile::pack(x[0].z * s, x[0].w * s, T{}), tile::pack(x[1].z * s, x[1].w * s, T{}),
        tile::pack(x[2].z * s, x[2].w * s, T{}), tile::pack(x[3].z * s, x[3].w * s, T{})};
}

template <class C, class T>
cudaError_t launch(const BackwardParams& p, const GradQuery& from, cudaStream_t stream) {
  const AttentionShape& s = p.shape;
  const StoreArgs args{
      p.dq, from, s.heads_q, s.seq_q, static_cast<int>(query_tiles(s)), p.softmax_scale, p.deterministic};
  const auto tiles = static_cast<unsigned>(s.batch * s.heads_q * args.tiles_q);
  store_dq_kernel<C, T><<<tiles, kStoreThreads<C>, 0, stream>>>(args);
  return cudaGetLastError();
}

template <class T>
cudaError_t launch_head_dim(const BackwardParams& p, const GradQuery& from, cudaStream_t stream) {
  return p.shape.head_dim == 64 ? launch<BackwardConfig<64>, T>(p, from, stream)
                                : launch<BackwardConfig<128>, T>(p, from, stream);
}

}  // namespace

int64_t query_tile_rows(const AttentionShape& s) {
  return s.head_dim == 64 ? BackwardConfig<64>::kTileQ : BackwardConfig<128>::kTileQ;
}

int64_t query_tiles(const AttentionShape& s) {
  return (s.seq_q + query_tile_rows(s) - 1) / query_tile_rows(s);
}

cudaError_t launch_store_dq(const BackwardParams& p, const GradQuery& from, cudaStream_t stream) {
  return p.dtype == DType::kFloat16 ? launch_head_dim<__half>(p, from, stream)
                                    : launch_head_dim<__nv_bfloat16>(p, from, stream);
}

}  // namespace attn_qat::sm90
