// dK and dV with mma.sync: one thread block for 128 keys of a kv head, one warp for 16 of them, looping over
// the query rows of every query head in the group. Everything is transposed, so that a warp owns its keys:
//
//   S^T = K^ Q^T,  dP^T = V^ dO^T,  P^T = exp2(t - E) * normaliser,  dS^T = bf16(P^T * (dP^T - delta))
//   dK += dS^T Q^,   dV += P^T dO with P quantised along keys
//
// A block of P is the 16 keys of a warp for one query: a column, two values in each of eight lanes. A
// butterfly over the lanes halves the columns at each step, so lane (g, t) ends with the maximum of column 8
// (g / 2) + 2 t + g % 2, computes that block's scale once and hands it to the others through a scratch of its
// warp.
//
// K^ stays in registers as A fragments, V^ in shared memory; Q^, dO and the row statistics stream through two
// cp.async stages. dS^T and P^T go from accumulators to A fragments without shared memory.
#include <cuda_runtime.h>

#include <cstddef>
#include <type_traits>

#include "cuda/mma_sync/fragments.cuh"
#include "cuda/mma_sync/launch.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/special_registers.cuh"
#include "cuda/tile/probability_quantizer.cuh"

namespace attn_qat::mma_sync {
namespace {

struct alignas(8) ColumnScale {
  float reciprocal;
  float factor;  // what a code is multiplied by
};

template <class C, class T>
struct BackwardDkDvSmem {
  alignas(128) T v[C::kTileK * C::kHeadDim];
  alignas(128) Quantized q[C::kStages][C::kTileQ * C::kHeadDim];
  alignas(128) T grad_out[C::kStages][C::kTileQ * C::kHeadDim];
  RowStatistics statistics[C::kStages][C::kTileQ];
  alignas(16) ColumnScale scales[C::kWarps][C::kTileQ];
};

struct BackwardDkDvArgs {
  BackwardParams p;
  const RowStatistics* statistics;  // [B, Hq, Sq]
  int tiles_k;
  float scale_log2;
};

// P is of the order 1 / S: FP16 holds it with this gain, taken back from dV.
template <class T>
constexpr float kDvGain = std::is_same_v<T, __half> ? 0x1p14f : 1.0f;

template <class C, class T, Recipe kRecipe>
struct BackwardDkDvWarp {
  static constexpr int kSteps = C::kHeadDim / 16, kNTiles = C::kTileQ / 8;
  using Addresses = tile::LaneAddresses<C::kHeadDim>;
  uint32_t k[kSteps][4];
  float dk[C::kHeadDim / 8][4], dv[C::kHeadDim / 8][4];
  int lane, key;  // key: this warp's first row in the tile

  __device__ BackwardDkDvWarp() : lane(threadIdx.x % 32), key(threadIdx.x / 32 * kWarpRows) {
    zero(dk), zero(dv);
  }

  __device__ void load(ptx::SmemAddr k_tile) {
    const auto rows = rows_then_columns<C::kHeadDim>(k_tile);
#pragma unroll
    for (int d = 0; d < kSteps; ++d) ptx::ldmatrix_x4(k[d], rows.at(d, key));
  }

  __device__ void products(const Addresses& v, const Addresses& q, const Addresses& grad_out,
                           float (&s)[kNTiles][4], float (&dp)[kNTiles][4]) const {
    zero(s), zero(dp);
#pragma unroll
    for (int d = 0; d < kSteps; ++d) {
      uint32_t a[4];
      ptx::ldmatrix_x4(a, v.at(d));
#pragma unroll
      for (int j = 0; j < kNTiles; j += 2) {
        uint32_t b[4];
        ptx::ldmatrix_x4(b, q.at(d, 8 * j));
        ptx::mma_m16n8k16(s[j], k[d], b[0], b[1], Quantized{});
        ptx::mma_m16n8k16(s[j + 1], k[d], b[2], b[3], Quantized{});
        ptx::ldmatrix_x4(b, grad_out.at(d, 8 * j));
        ptx::mma_m16n8k16(dp[j], a, b[0], b[1], T{});
        ptx::mma_m16n8k16(dp[j + 1], a, b[2], b[3], T{});
      }
    }
  }

  // Queries of the tile before first_query[r] do not see key half r.
  __device__ void mask(float (&s)[kNTiles][4], const int (&first_query)[2]) const {
#pragma unroll
    for (int j = 0; j < kNTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (8 * j + lane % 4 * 2 + e % 2 < first_query[e / 2]) s[j][e] = -__builtin_inff();
  }

  // s becomes what is quantised (recipe fp4: p before its normaliser, else P), dp becomes dS.
  __device__ void probabilities(const RowStatistics* statistics, float scale_log2, float (&s)[kNTiles][4],
                                float (&dp)[kNTiles][4]) const {
#pragma unroll
    for (int j = 0; j < kNTiles; ++j)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const RowStatistics x = statistics[8 * j + lane % 4 * 2 + c];
#pragma unroll
        for (int e = c; e < 4; e += 2) {
          const float unnormalised = ptx::ex2_approx_ftz(__fmul_rn(s[j][e], scale_log2) - x.exponent);
          const float probability = unnormalised * x.normaliser;
          dp[j][e] = probability * (dp[j][e] - x.delta);
          s[j][e] = kRecipe == Recipe::kFp4 ? unnormalised : probability;
        }
      }
  }

  // s becomes the left operand of dV: quantised, with the normaliser and the FP16 gain applied.
  __device__ void quantize(const RowStatistics* statistics, ColumnScale* scratch,
                           float (&s)[kNTiles][4]) const {
    constexpr int kColumns = 2 * kNTiles;
    float top[kColumns];
#pragma unroll
    for (int j = 0; j < kNTiles; ++j) {
      top[2 * j] = fmaxf(s[j][0], s[j][2]);
      top[2 * j + 1] = fmaxf(s[j][1], s[j][3]);
    }
#pragma unroll
    for (int width = kColumns / 2, bit = 16; width >= 1; width /= 2, bit /= 2) {
      const bool upper = lane & bit;
#pragma unroll
      for (int i = 0; i < width; ++i) {
        const float send = upper ? top[i] : top[i + width], keep = upper ? top[i + width] : top[i];
        top[i] = fmaxf(keep, __shfl_xor_sync(0xffffffffu, send, bit));
      }
    }
    const int column = lane / 8 * 8 + lane % 4 * 2 + lane / 4 % 2;
    const tile::BlockScale block = tile::block_scale(top[0], kProbabilityGain<kRecipe>);
    ColumnScale own{block.reciprocal, block.scale * kDvGain<T>};
    if constexpr (kRecipe == Recipe::kFp4) own.factor *= statistics[column].normaliser;
    __syncwarp();  // the scales of the previous tile have been read
    scratch[column] = own;
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kNTiles; ++j) {
      const auto pair = *reinterpret_cast<const float4*>(&scratch[8 * j + lane % 4 * 2]);
      tile::quantize_pair(s[j][0], s[j][2], pair.x, pair.y);
      tile::quantize_pair(s[j][1], s[j][3], pair.z, pair.w);
    }
  }
};

// Which keys of which kv head a thread block owns.
template <class C>
struct Place {
  int64_t b, h_kv, first_key;
  __device__ Place(const BackwardDkDvArgs& args, uint32_t block) {
    const int64_t head_kv = block / args.tiles_k;
    b = head_kv / args.p.shape.heads_kv, h_kv = head_kv % args.p.shape.heads_kv;
    first_key = int64_t{block % args.tiles_k} * C::kTileK;
  }
};

template <class C, class T, Recipe kRecipe>
__global__ void __launch_bounds__(C::kThreads, C::kBlocksPerSm)
    backward_dkdv_kernel(const __grid_constant__ BackwardDkDvArgs args) {
  extern __shared__ __align__(128) unsigned char raw[];
  auto& smem = *reinterpret_cast<BackwardDkDvSmem<C, T>*>(raw);
  const BackwardParams& p = args.p;
  const AttentionShape& shape = p.shape;
  const Place<C> here(args, blockIdx.x);
  const int64_t b = here.b, h_kv = here.h_kv, first_key = here.first_key;
  const int64_t offset = shape.seq_k - shape.seq_q;
  const int64_t keys_left = shape.seq_k - first_key;
  const int group = static_cast<int>(shape.heads_q / shape.heads_kv);
  const int first_tile = p.causal ? static_cast<int>(max(first_key - offset, int64_t{0}) / C::kTileQ) : 0;

  // Tiles come in the order of query heads, then rows; `next` runs one tile ahead of the products.
  const int first_row = first_tile * C::kTileQ, seq_q = static_cast<int>(shape.seq_q);
  struct {
    int head, row;
  } next{static_cast<int>(h_kv) * group, first_row}, now = next;
  const auto q_of = [&](int h) { return head_pointer<Quantized>(p.q, b, h) + first_row * p.q.stride_s; };
  const auto grad_of = [&](int h) {
    return head_pointer<T>(p.grad_out, b, h) + first_row * p.grad_out.stride_s;
  };
  using QueryRows = tile::NaturalRows;
  tile::RowLoader<C::kHeadDim, C::kTileQ, C::kThreads, QueryRows, Quantized> q_loader(q_of(next.head),
                                                                                      p.q.stride_s);
  tile::RowLoader<C::kHeadDim, C::kTileQ, C::kThreads, QueryRows, T> grad_loader(grad_of(next.head),
                                                                                 p.grad_out.stride_s);
  // True when `at` moved on to the next head.
  const auto advance = [&](auto& at) {
    at.row += C::kTileQ;
    if (at.row < seq_q) return false;
    at.row = first_row;
    ++at.head;
    return true;
  };
  const auto load_queries = [&](int stage) {
    q_loader.load(ptx::smem_addr(smem.q[stage]), seq_q - next.row);
    grad_loader.load(ptx::smem_addr(smem.grad_out[stage]), seq_q - next.row);
    if (threadIdx.x < C::kTileQ) {
      const int row = next.row + static_cast<int>(threadIdx.x);
      const auto* from = args.statistics + (b * shape.heads_q + next.head) * shape.seq_q + row;
      ptx::cp_async_16(ptx::smem_addr(&smem.statistics[stage][threadIdx.x]), from, row < seq_q);
    }
    if (advance(next)) q_loader.restart(q_of(next.head)), grad_loader.restart(grad_of(next.head));
  };

  // K passes through the stages' memory on its way to registers.
  static_assert(sizeof(smem.q) + sizeof(smem.grad_out) >= sizeof(Quantized) * C::kTileK * C::kHeadDim);
  const ptx::SmemAddr k_tile = ptx::smem_addr(smem.q[0]);
  tile::RowLoader<C::kHeadDim, C::kTileK, C::kThreads, tile::NaturalRows, Quantized>(
      head_pointer<Quantized>(p.k, b, h_kv) + first_key * p.k.stride_s, p.k.stride_s)
      .load(k_tile, tile_limit(keys_left));
  tile::RowLoader<C::kHeadDim, C::kTileK, C::kThreads, tile::NaturalRows, T>(
      head_pointer<T>(p.v, b, h_kv) + first_key * p.v.stride_s, p.v.stride_s)
      .load(ptx::smem_addr(smem.v), tile_limit(keys_left));
  ptx::cp_async_commit_group();
  ptx::cp_async_wait_group<0>();
  __syncthreads();  // K and V have landed
  BackwardDkDvWarp<C, T, kRecipe> warp;
  warp.load(k_tile);
  __syncthreads();  // every warp has its K: the stages may be overwritten

  const int head_end =
      first_row < seq_q ? (static_cast<int>(h_kv) + 1) * group : 0;  // 0: no query sees these keys
  if (now.head < head_end) load_queries(0);
  ptx::cp_async_commit_group();
  using Smem = BackwardDkDvSmem<C, T>;
  constexpr int kStageBytes = sizeof(smem.q[0]), kGradOffset = offsetof(Smem, grad_out) - offsetof(Smem, q);
  static_assert(sizeof(smem.grad_out[0]) == kStageBytes);
  const int keys_here = tile_limit(keys_left);  // that exist from the tile's first one on
  const int64_t diagonal =
      p.causal ? first_key - offset : -C::kTileK;  // the query row from which the first key is seen
  const int first_seen =
      static_cast<int>(min(max(diagonal, int64_t{-C::kTileK}), int64_t{INT32_MAX} - C::kTileK));
  for (int stage = 0; now.head < head_end; stage = (stage + 1) % C::kStages) {
    ptx::cp_async_wait_group<0>();
    __syncthreads();  // this tile has landed for everyone, and nobody reads the other stage any more
    if (next.head < head_end) load_queries((stage + 1) % C::kStages);
    ptx::cp_async_commit_group();
    float s[C::kTileQ / 8][4], dp[C::kTileQ / 8][4];
    // Addresses are made anew where they are used: kept, they would cost the registers that are short here.
    const auto v =
        rows_then_columns<C::kHeadDim>(ptx::smem_addr(smem.v + warp.key * C::kHeadDim), ptx::laneid());
    const auto rows = columns_then_rows<C::kHeadDim>(ptx::smem_addr(smem.q[stage]), ptx::laneid());
    warp.products(v, rows, rows.shift(kGradOffset), s, dp);
    if (keys_here < C::kTileK || now.row < first_seen + C::kTileK - 1) {
      const int key = warp.key + warp.lane / 4;  // in the tile, of row half 0
      int first_query[2];
#pragma unroll
      for (int r = 0; r < 2; ++r)
        first_query[r] = key + 8 * r >= keys_here ? C::kTileQ : first_seen + key + 8 * r - now.row;
      warp.mask(s, first_query);
    }
    warp.probabilities(smem.statistics[stage], args.scale_log2, s, dp);
    const auto columns = rows_then_columns<C::kHeadDim>(ptx::smem_addr(smem.q[stage]), ptx::laneid());
    uint32_t a[C::kTileQ / 16][4];
    pack_a<C::kTileQ / 16, Quantized>(dp, a);
    multiply_rows<C::kHeadDim, C::kTileQ / 16, Quantized>(warp.dk, a, columns, 0);
    if constexpr (kRecipe != Recipe::kFp4Qk) {
      warp.quantize(smem.statistics[stage], smem.scales[threadIdx.x / 32], s);
    } else if constexpr (kDvGain<T> != 1.0f) {
#pragma unroll
      for (auto& tile : s)
#pragma unroll
        for (float& x : tile) x *= kDvGain<T>;
    }
    pack_a<C::kTileQ / 16, T>(s, a);
    multiply_rows<C::kHeadDim, C::kTileQ / 16, T>(warp.dv, a, columns.shift(kGradOffset), 0);
    advance(now);
  }
  const Place<C> place(args, ptx::ctaid_x());
  const int64_t first = place.first_key + warp.key;
  store_rows<C::kHeadDim, T>(p.dk, place.b, place.h_kv, first, shape.seq_k, warp.dk, p.softmax_scale);
  store_rows<C::kHeadDim, T>(p.dv, place.b, place.h_kv, first, shape.seq_k, warp.dv, 1.0f / kDvGain<T>);
}

template <class C, class T, Recipe kRecipe>
cudaError_t launch(const BackwardParams& p, const RowStatistics* statistics, cudaStream_t stream) {
  const int64_t tiles_k = (p.shape.seq_k + C::kTileK - 1) / C::kTileK;
  const BackwardDkDvArgs args{p, statistics, static_cast<int>(tiles_k), scale_log2(p.softmax_scale)};
  return launch_tiles<C, BackwardDkDvSmem<C, T>>(backward_dkdv_kernel<C, T, kRecipe>, args,
                                                 tiles_k * p.shape.batch * p.shape.heads_kv, stream);
}

template <class C, class T>
cudaError_t launch_recipe(const BackwardParams& p, const RowStatistics* statistics, cudaStream_t stream) {
  switch (p.recipe) {
    case Recipe::kCudnn: return launch<C, T, Recipe::kCudnn>(p, statistics, stream);
    case Recipe::kFp4: return launch<C, T, Recipe::kFp4>(p, statistics, stream);
    case Recipe::kFp4Qk: return launch<C, T, Recipe::kFp4Qk>(p, statistics, stream);
  }
  return cudaErrorInvalidValue;
}

template <class T>
cudaError_t launch_head_dim(const BackwardParams& p, const RowStatistics* statistics, cudaStream_t stream) {
  if (p.shape.head_dim == 64) return launch_recipe<BackwardDkDvConfig<64>, T>(p, statistics, stream);
  return launch_recipe<BackwardDkDvConfig<128>, T>(p, statistics, stream);
}

}  // namespace

cudaError_t launch_backward_dkdv(const BackwardParams& p, const RowStatistics* statistics,
                                 cudaStream_t stream) {
  if (p.dtype == DType::kFloat16) return launch_head_dim<__half>(p, statistics, stream);
  return launch_head_dim<__nv_bfloat16>(p, statistics, stream);
}

}  // namespace attn_qat::mma_sync
