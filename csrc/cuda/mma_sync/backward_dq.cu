// dQ with mma.sync: one thread block for 128 query rows of a head, one warp for 16 of them, looping over
// keys.
//
//   S = Q^ K^T,  dP = dO V^T,  P = exp2(t - E) * normaliser,  dS = bf16(P * (dP - delta)),  dQ += dS K^
//
// Q^ and dO stay in registers as A fragments, dS goes from accumulators to A fragments without shared memory:
// only K and V pass through it, in two cp.async stages that first hold Q and dO.
#include <cuda_runtime.h>

#include <cstddef>

#include "cuda/mma_sync/fragments.cuh"
#include "cuda/mma_sync/launch.cuh"
#include "cuda/ptx/math.cuh"

namespace attn_qat::mma_sync {
namespace {

template <class C, class T>
union BackwardDqSmem {
  struct {
    alignas(128) Quantized q[C::kTileQ * C::kHeadDim];
    alignas(128) T grad_out[C::kTileQ * C::kHeadDim];
  } first;
  struct {
    alignas(128) Quantized k[C::kStages][C::kTileK * C::kHeadDim];
    alignas(128) T v[C::kStages][C::kTileK * C::kHeadDim];
  } loop;
};

struct BackwardDqArgs {
  BackwardParams p;
  const RowStatistics* statistics;  // [B, Hq, Sq]
  int tiles_q;
  float scale_log2;
};

template <class C, class T>
struct BackwardDqWarp {
  static constexpr int kSteps = C::kHeadDim / 16, kNTiles = C::kStepK / 8;
  using Addresses = tile::LaneAddresses<C::kHeadDim>;
  uint32_t q[kSteps][4], grad_out[kSteps][4];
  float dq[C::kHeadDim / 8][4];
  float exponent[2], normaliser[2], delta[2];

  __device__ void load(ptx::SmemAddr q_tile, ptx::SmemAddr grad_tile) {
    const int row = threadIdx.x / 32 * kWarpRows;
    const auto q_rows = rows_then_columns<C::kHeadDim>(q_tile),
               grad_rows = rows_then_columns<C::kHeadDim>(grad_tile);
#pragma unroll
    for (int d = 0; d < kSteps; ++d) {
      ptx::ldmatrix_x4(q[d], q_rows.at(d, row));
      ptx::ldmatrix_x4(grad_out[d], grad_rows.at(d, row));
    }
  }

  // Adds what kStepK keys from row `key` of the tiles contribute; limit[r]: first invisible key for row half
  // r.
  __device__ void step(const Addresses& k, const Addresses& v, const Addresses& k_trans, int key, bool masked,
                       const int (&limit)[2], float scale_log2) {
    float s[kNTiles][4], dp[kNTiles][4];
    zero(s), zero(dp);
#pragma unroll
    for (int d = 0; d < kSteps; ++d)
#pragma unroll
      for (int j = 0; j < kNTiles; j += 2) {
        uint32_t b[4];
        ptx::ldmatrix_x4(b, k.at(d, key + 8 * j));
        ptx::mma_m16n8k16(s[j], q[d], b[0], b[1], Quantized{});
        ptx::mma_m16n8k16(s[j + 1], q[d], b[2], b[3], Quantized{});
        ptx::ldmatrix_x4(b, v.at(d, key + 8 * j));
        ptx::mma_m16n8k16(dp[j], grad_out[d], b[0], b[1], T{});
        ptx::mma_m16n8k16(dp[j + 1], grad_out[d], b[2], b[3], T{});
      }
    if (masked) mask(s, key, limit);
#pragma unroll
    for (int j = 0; j < kNTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int r = e / 2;
        const float p = ptx::ex2_approx_ftz(__fmul_rn(s[j][e], scale_log2) - exponent[r]) * normaliser[r];
        dp[j][e] = p * (dp[j][e] - delta[r]);
      }
    uint32_t ds[kNTiles / 2][4];
    pack_a<kNTiles / 2, Quantized>(dp, ds);
    multiply_rows<C::kHeadDim, kNTiles / 2, Quantized>(dq, ds, k_trans, key);
  }

  __device__ void mask(float (&s)[kNTiles][4], int key, const int (&limit)[2]) const {
#pragma unroll
    for (int j = 0; j < kNTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (key + 8 * j + static_cast<int>(threadIdx.x) % 4 * 2 + e % 2 >= limit[e / 2])
          s[j][e] = -__builtin_inff();
  }
};

template <class C, class T>
__global__ void __launch_bounds__(C::kThreads, C::kBlocksPerSm)
    backward_dq_kernel(const __grid_constant__ BackwardDqArgs args) {
  extern __shared__ __align__(128) unsigned char raw[];
  auto& smem = *reinterpret_cast<BackwardDqSmem<C, T>*>(raw);
  const BackwardParams& p = args.p;
  const AttentionShape& shape = p.shape;
  const int64_t tile_q = args.tiles_q - 1 - blockIdx.x % args.tiles_q, head = blockIdx.x / args.tiles_q;
  const int64_t b = head / shape.heads_q, h = head % shape.heads_q,
                h_kv = h / (shape.heads_q / shape.heads_kv);
  const int64_t first_row = tile_q * C::kTileQ, offset = shape.seq_k - shape.seq_q;
  const int64_t last_row = min(first_row + C::kTileQ, shape.seq_q) - 1;
  const int64_t keys = p.causal ? max(last_row + 1 + offset, int64_t{0}) : shape.seq_k;
  const int tiles_k = static_cast<int>((keys + C::kTileK - 1) / C::kTileK);

  BackwardDqWarp<C, T> warp;
  zero(warp.dq);
  const int rows = tile_limit(shape.seq_q - first_row);
  tile::RowLoader<C::kHeadDim, C::kTileQ, C::kThreads, tile::NaturalRows, Quantized>(
      head_pointer<Quantized>(p.q, b, h) + first_row * p.q.stride_s, p.q.stride_s)
      .load(ptx::smem_addr(smem.first.q), rows);
  tile::RowLoader<C::kHeadDim, C::kTileQ, C::kThreads, tile::NaturalRows, T>(
      head_pointer<T>(p.grad_out, b, h) + first_row * p.grad_out.stride_s, p.grad_out.stride_s)
      .load(ptx::smem_addr(smem.first.grad_out), rows);
  ptx::cp_async_commit_group();
  const int64_t row = first_row + threadIdx.x / 32 * kWarpRows + threadIdx.x % 32 / 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool valid = row + 8 * r < shape.seq_q;
    const RowStatistics x =
        valid ? args.statistics[head * shape.seq_q + row + 8 * r] : RowStatistics{0.0f, 0.0f, 0.0f, 0.0f};
    warp.exponent[r] = x.exponent, warp.normaliser[r] = x.normaliser, warp.delta[r] = x.delta;
  }
  ptx::cp_async_wait_group<0>();
  __syncthreads();  // Q and dO have landed
  warp.load(ptx::smem_addr(smem.first.q), ptx::smem_addr(smem.first.grad_out));
  __syncthreads();  // every warp has them in registers: the stages may be overwritten

  using KeyRows = tile::NaturalRows;
  tile::RowLoader<C::kHeadDim, C::kTileK, C::kThreads, KeyRows, Quantized> k_loader(
      head_pointer<Quantized>(p.k, b, h_kv), p.k.stride_s);
  tile::RowLoader<C::kHeadDim, C::kTileK, C::kThreads, KeyRows, T> v_loader(head_pointer<T>(p.v, b, h_kv),
                                                                            p.v.stride_s);
  const int seq_k = static_cast<int>(shape.seq_k);
  const auto load_keys = [&](int j) {
    k_loader.load(ptx::smem_addr(smem.loop.k[j % C::kStages]), seq_k - j * C::kTileK);
    v_loader.load(ptx::smem_addr(smem.loop.v[j % C::kStages]), seq_k - j * C::kTileK);
  };
  using Smem = BackwardDqSmem<C, T>;
  constexpr int kStageBytes = sizeof(smem.loop.k[0]),
                kVOffset = offsetof(Smem, loop.v) - offsetof(Smem, loop.k);
  const auto k_rows = columns_then_rows<C::kHeadDim>(ptx::smem_addr(smem.loop.k));
  const auto k_columns = rows_then_columns<C::kHeadDim>(ptx::smem_addr(smem.loop.k));
  if (tiles_k > 0) load_keys(0);
  ptx::cp_async_commit_group();
  for (int j = 0; j < tiles_k; ++j) {
    ptx::cp_async_wait_group<0>();
    __syncthreads();  // tile j has landed for everyone, and nobody reads the other stage any more
    if (j + 1 < tiles_k) load_keys(j + 1);
    ptx::cp_async_commit_group();
    const int64_t from = int64_t{j} * C::kTileK, end = shape.seq_k - from, diagonal = row + 1 + offset - from;
    const bool masked =
        C::kTileK > (p.causal ? min(first_row + 1 + offset, shape.seq_k) : shape.seq_k) - from;
    const int limit[2] = {tile_limit(p.causal ? min(end, diagonal) : end),
                          tile_limit(p.causal ? min(end, diagonal + 8) : end)};
    const int stage = j % C::kStages * kStageBytes;
    const auto keys_of_k = k_rows.shift(stage), keys_of_v = keys_of_k.shift(kVOffset);
#pragma unroll
    for (int key = 0; key < C::kTileK; key += C::kStepK)
      warp.step(keys_of_k, keys_of_v, k_columns.shift(stage), key, masked, limit, args.scale_log2);
  }
  store_rows<C::kHeadDim, T>(p.dq, b, h, first_row + threadIdx.x / 32 * kWarpRows, shape.seq_q, warp.dq,
                             p.softmax_scale);
}

template <class C, class T>
cudaError_t launch(const BackwardParams& p, const RowStatistics* statistics, cudaStream_t stream) {
  const int64_t tiles_q = (p.shape.seq_q + C::kTileQ - 1) / C::kTileQ;
  const BackwardDqArgs args{p, statistics, static_cast<int>(tiles_q), scale_log2(p.softmax_scale)};
  return launch_tiles<C, BackwardDqSmem<C, T>>(backward_dq_kernel<C, T>, args,
                                               tiles_q * p.shape.batch * p.shape.heads_q, stream);
}

template <class T>
cudaError_t launch_head_dim(const BackwardParams& p, const RowStatistics* statistics, cudaStream_t stream) {
  if (p.shape.head_dim == 64) return launch<BackwardDqConfig<64>, T>(p, statistics, stream);
  return launch<BackwardDqConfig<128>, T>(p, statistics, stream);
}

}  // namespace

cudaError_t launch_backward_dq(const BackwardParams& p, const RowStatistics* statistics,
                               cudaStream_t stream) {
  if (p.dtype == DType::kFloat16) return launch_head_dim<__half>(p, statistics, stream);
  return launch_head_dim<__nv_bfloat16>(p, statistics, stream);
}

}  // namespace attn_qat::mma_sync
