// Forward of FP4 attention with mma.sync: one thread block for 128 query rows of a head, one warp for 16 of
// them.
//
//   for each tile of 64 keys:   S = Q^ K^T          16 x 64 in registers, exact products of FP4 values
//                               E = ceil(row max)   when it grows, what was summed shrinks by an exact 2^n
//                               p = exp2(t - E),    P^ = fp4(p)
//                               O_hp += p V^,       O += P^ V^,      l += rowsum(p)
//
// Inference (kTraining false) wants O alone: where the recipe quantises P it leaves O_hp out, and gets the same O.
//
// Recipe cudnn takes E from a first pass over S: with a gain of 1, blocks of small probabilities sit at the floor
// of the scale, where they depend on E.
//
// Keys are permuted inside a tile so that quantising needs no shuffle: column 8 j + 2 t + e of S (t the lane
// within its row, e < 2) is key 16 t + 2 j + e. Lane t then owns the whole block 16 t .. 16 t + 15. The
// permutation is only in the rows that ldmatrix addresses, alike for K and V.
//
//   stage 0:  K V | compute        | load K V (tile 2)  | compute ...      cp.async, two stages; the barrier
//   stage 1:        load K V (1)   | compute            | load ...         at a tile's top frees the other one
#include <cuda_runtime.h>

#include "cuda/mma_sync/fragments.cuh"
#include "cuda/mma_sync/launch.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/probability_quantizer.cuh"

namespace attn_qat::mma_sync {
namespace {

template <class C, class T>
struct ForwardSmem {
  alignas(128) Quantized q[C::kTileQ * C::kHeadDim];
  alignas(128) Quantized k[C::kStages][C::kTileK * C::kHeadDim];
  alignas(128) T v[C::kStages][C::kTileK * C::kHeadDim];
};

struct ForwardArgs {
  ForwardParams p;
  int tiles_q;
  float scale_log2;  // softmax_scale * log2 e
};

// How a lane addresses a tile of keys for S (keys as columns) and for P V (keys summed over): the lane's part
// of the permutation is its row, 8 columns of S more are 2 rows more.
template <int kHeadDim>
__device__ __forceinline__ tile::LaneAddresses<kHeadDim> keys_as_columns(ptx::SmemAddr t) {
  const int lane = threadIdx.x % 32, row = lane % 8 / 2 * 16 + lane % 2 + lane / 16 * 2;
  return {t, row, tile::PermutedRows::swizzle(row), lane / 8 % 2};
}
template <int kHeadDim>
__device__ __forceinline__ tile::LaneAddresses<kHeadDim> keys_summed_over(ptx::SmemAddr t) {
  const int lane = threadIdx.x % 32, row = lane % 8 / 2 * 16 + lane % 2 + lane / 8 % 2 * 2;
  return {t, row, tile::PermutedRows::swizzle(row), lane / 16};
}

constexpr float kNegativeInfinity = -__builtin_inff();

template <class C, class T, Recipe kRecipe, bool kTraining>
struct ForwardWarp {
  static constexpr int kNTiles = C::kTileK / 8, kDTiles = C::kHeadDim / 8;
  using Addresses = tile::LaneAddresses<C::kHeadDim>;
  static constexpr bool kQuantizes = kRecipe != Recipe::kFp4Qk;
  static constexpr bool kHighPrecision = kTraining || !kQuantizes;  // O_hp is wanted, or is O
  static_assert(kTraining || kRecipe != Recipe::kCudnn, "a recipe for training");
  static constexpr int kPTiles = kHighPrecision ? kNTiles : 1, kQuantizedTiles = kQuantizes ? kNTiles : 1;
  float out[kQuantizes ? kDTiles : 1][4], high_precision_out[kHighPrecision ? kDTiles : 1][4];
  float row_max[2], exponent[2], row_sum[2];
  // Row sums of p as the products see it, rounded: what O_hp is divided by, so that a row of one key gives V
  // itself and delta carries no bias. lse and O take row_sum, of p before rounding.
  float rounded_sum[4];
  int lane;

  __device__ ForwardWarp() : lane(threadIdx.x % 32) {
#pragma unroll
    for (int i = 0; i < kDTiles; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if constexpr (kHighPrecision) high_precision_out[i][j] = 0.0f;
        if constexpr (kQuantizes) out[i][j] = 0.0f;
      }
    rounded_sum[0] = rounded_sum[1] = rounded_sum[2] = rounded_sum[3] = 0.0f;
    row_max[0] = row_max[1] = kNegativeInfinity;
    exponent[0] = exponent[1] = row_sum[0] = row_sum[1] = 0.0f;
  }

  // s = Q^ K^T for this warp's rows, columns in permuted key order.
  __device__ void scores(const Addresses& q, const Addresses& k, float (&s)[kNTiles][4]) const {
    zero(s);
#pragma unroll
    for (int d = 0; d < C::kHeadDim / 16; ++d) {
      uint32_t a[4];
      ptx::ldmatrix_x4(a, q.at(d));
#pragma unroll
      for (int j = 0; j < kNTiles; j += 2) {
        uint32_t b[4];
        ptx::ldmatrix_x4(b, k.at(d, 2 * j));
        ptx::mma_m16n8k16(s[j], a, b[0], b[1], Quantized{});
        ptx::mma_m16n8k16(s[j + 1], a, b[2], b[3], Quantized{});
      }
    }
  }

  // Columns of row half r that are not visible: keys from limit[r] on.
  __device__ void mask(float (&s)[kNTiles][4], const int (&limit)[2]) const {
#pragma unroll
    for (int j = 0; j < kNTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (lane % 4 * 16 + 2 * j + e % 2 >= limit[e / 2]) s[j][e] = kNegativeInfinity;
  }

  // Largest t = scale s of this lane's block in each row.
  __device__ void block_maxima(const float (&s)[kNTiles][4], float scale_log2, float (&block_max)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = s[0][2 * r];
#pragma unroll
      for (int j = 0; j < kNTiles; ++j) top = fmaxf(top, fmaxf(s[j][2 * r], s[j][2 * r + 1]));
      block_max[r] = __fmul_rn(top, scale_log2);
    }
  }

  // Takes a tile into the row maxima and the exponents; what was summed so far follows by an exact 2^n.
  __device__ void raise_exponents(const float (&block_max)[2]) {
    bool grew = false;
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = fmaxf(block_max[r], __shfl_xor_sync(0xffffffffu, block_max[r], 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
      const bool first = row_max[r] == kNegativeInfinity;
      row_max[r] = fmaxf(row_max[r], top);
      const float next = row_max[r] == kNegativeInfinity ? 0.0f : ceilf(row_max[r]);
      factor[r] = first ? 1.0f : ptx::ex2_approx_ftz(exponent[r] - next);
      grew |= next != exponent[r] && !first;
      exponent[r] = next;
    }
    if (kRecipe != Recipe::kCudnn && __any_sync(0xffffffffu, grew))
      rescale(factor);  // cudnn: nothing is summed yet
  }

  __device__ void rescale(const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < kDTiles; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if constexpr (kHighPrecision) high_precision_out[i][e] *= factor[e / 2];
        if constexpr (kQuantizes) out[i][e] *= factor[e / 2];
      }
    row_sum[0] *= factor[0], row_sum[1] *= factor[1];
    rounded_sum[0] *= factor[0], rounded_sum[2] *= factor[1];
  }

  // s becomes p, packed as the A fragments of p V^ and, quantised with a gain of 2^k left in, of P^ V^.
  __device__ void probabilities(float (&s)[kNTiles][4], float scale_log2, const float (&block_max)[2],
                                uint32_t (&p)[kPTiles][2], uint32_t (&quantized)[kQuantizedTiles][2]) {
    constexpr float kGain = kProbabilityGain<kRecipe>;
    tile::BlockScale block[2];
    if constexpr (kQuantizes) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        block[r] = tile::block_scale(ptx::ex2_approx_ftz(block_max[r] - exponent[r]), kGain);
        block[r].scale *= kGain * tile::kCodeUnit;
      }
    }
#pragma unroll
    for (int j = 0; j < kNTiles; ++j)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float &p0 = s[j][2 * r], &p1 = s[j][2 * r + 1];
        p0 = ptx::ex2_approx_ftz(__fmul_rn(p0, scale_log2) - exponent[r]);
        p1 = ptx::ex2_approx_ftz(__fmul_rn(p1, scale_log2) - exponent[r]);
        row_sum[r] += p0;
        row_sum[r] += p1;
        if constexpr (kHighPrecision) p[j][r] = tile::pack(p0, p1, T{});
        if constexpr (kQuantizes) {
          tile::quantize_pair_in_units(p0, p1, block[r].reciprocal, block[r].scale);
          quantized[j][r] = tile::pack(p0, p1, T{});
        }
      }
  }

  __device__ void accumulate(const Addresses& v, const uint32_t (&p)[kPTiles][2],
                             const uint32_t (&quantized)[kQuantizedTiles][2]) {
#pragma unroll
    for (int j = 0; j < kNTiles; j += 2) {
      uint32_t a[4];
      if constexpr (kHighPrecision) {
        a[0] = p[j][0], a[1] = p[j][1], a[2] = p[j + 1][0], a[3] = p[j + 1][1];
        const uint32_t ones = tile::pack(1.0f, 1.0f, T{});
        ptx::mma_m16n8k16(rounded_sum, a, ones, ones, T{});
      }
#pragma unroll
      for (int d = 0; d < kDTiles / 2; ++d) {
        uint32_t b[4];
        ptx::ldmatrix_x4_trans(b, v.at(d, 2 * j));
        if constexpr (kHighPrecision) {
          ptx::mma_m16n8k16(high_precision_out[2 * d], a, b[0], b[1], T{});
          ptx::mma_m16n8k16(high_precision_out[2 * d + 1], a, b[2], b[3], T{});
        }
        if constexpr (kQuantizes) {
          const uint32_t q[4] = {quantized[j][0], quantized[j][1], quantized[j + 1][0], quantized[j + 1][1]};
          ptx::mma_m16n8k16(out[2 * d], q, b[0], b[1], T{});
          ptx::mma_m16n8k16(out[2 * d + 1], q, b[2], b[3], T{});
        }
      }
    }
  }

  __device__ void store_rows(const ForwardParams& p, int64_t b, int64_t h, int64_t first_row) {
    constexpr float kInverseGain = 1.0f / kProbabilityGain<kRecipe>;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = row_sum[r] + __shfl_xor_sync(0xffffffffu, row_sum[r], 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      const int64_t row = first_row + threadIdx.x / 32 * kWarpRows + lane / 4 + 8 * r;
      if (row >= p.shape.seq_q) continue;
      const bool empty = sum == 0.0f;
      const float inverse = empty ? 0.0f : 1.0f / sum;
      const int64_t at = (b * p.shape.heads_q + h) * p.shape.seq_q + row;
      if (lane % 4 == 0) {
        if (kTraining || p.lse)
          p.lse[at] = empty ? kNegativeInfinity : (exponent[r] + log2f(sum)) * static_cast<float>(kLn2);
        if constexpr (kTraining)
          p.row_exponent[at] = empty ? INT32_MIN : max(static_cast<int32_t>(exponent[r]), INT32_MIN + 1);
      }
      const float inverse_rounded = empty ? 0.0f : 1.0f / rounded_sum[2 * r];
      if constexpr (kTraining)
        store_row<kDTiles>(p.high_precision_out, b, h, row, r, high_precision_out, inverse_rounded);
      if constexpr (kQuantizes)
        store_row<kDTiles>(p.out, b, h, row, r, out, inverse * kInverseGain);
      else
        store_row<kDTiles>(p.out, b, h, row, r, high_precision_out, inverse_rounded);
    }
  }

  template <int kTiles>
  __device__ void store_row(const View& view, int64_t b, int64_t h, int64_t row, int r,
                            const float (&x)[kTiles][4], float scale) const {
    T* to = static_cast<T*>(view.data) + b * view.stride_b + h * view.stride_h + row * view.stride_s +
            lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
      *reinterpret_cast<uint32_t*>(to + 8 * i) =
          tile::pack(x[i][2 * r] * scale, x[i][2 * r + 1] * scale, T{});
  }
};

// The second pass of recipe cudnn needs a few registers more than three blocks leave it.
template <class C, Recipe kRecipe>
constexpr int kBlocksPerSm = kRecipe == Recipe::kCudnn && C::kBlocksPerSm > 2 ? 2 : C::kBlocksPerSm;

template <class C, class T, Recipe kRecipe, bool kTraining>
__global__ void __launch_bounds__(C::kThreads, kBlocksPerSm<C, kRecipe>)
    forward_kernel(const __grid_constant__ ForwardArgs args) {
  extern __shared__ __align__(128) unsigned char raw[];
  auto& smem = *reinterpret_cast<ForwardSmem<C, T>*>(raw);
  const ForwardParams& p = args.p;
  const AttentionShape& shape = p.shape;
  // The last query tiles see the most keys under a causal mask: they start first.
  const int64_t tile_q = args.tiles_q - 1 - blockIdx.x % args.tiles_q, head = blockIdx.x / args.tiles_q;
  const int64_t b = head / shape.heads_q, h = head % shape.heads_q,
                h_kv = h / (shape.heads_q / shape.heads_kv);
  const int64_t first_row = tile_q * C::kTileQ, offset = shape.seq_k - shape.seq_q;
  const int64_t last_row = min(first_row + C::kTileQ, shape.seq_q) - 1;
  const int64_t keys = p.causal ? max(last_row + 1 + offset, int64_t{0}) : shape.seq_k;
  const int tiles_k = static_cast<int>((keys + C::kTileK - 1) / C::kTileK);
  const auto* k = head_pointer<Quantized>(p.k, b, h_kv);
  const auto* v = head_pointer<T>(p.v, b, h_kv);

  using KeyRows = tile::PermutedRows;
  tile::RowLoader<C::kHeadDim, C::kTileK, C::kThreads, KeyRows, Quantized> k_loader(k, p.k.stride_s);
  tile::RowLoader<C::kHeadDim, C::kTileK, C::kThreads, KeyRows, T> v_loader(v, p.v.stride_s);
  const int seq_k = static_cast<int>(shape.seq_k);
  const auto load_k = [&](int j) {
    k_loader.load(ptx::smem_addr(smem.k[j % C::kStages]), seq_k - j * C::kTileK);
  };
  const auto load_kv = [&](int j) {
    load_k(j);
    v_loader.load(ptx::smem_addr(smem.v[j % C::kStages]), seq_k - j * C::kTileK);
  };

  using Warp = ForwardWarp<C, T, kRecipe, kTraining>;
  Warp warp;
  constexpr int kStageBytes = sizeof(smem.k[0]);
  const auto q = rows_then_columns<C::kHeadDim>(ptx::smem_addr(smem.q))
                     .shift(threadIdx.x / 32 * kWarpRows * C::kHeadDim * 2);
  // These follow the stage in use: kept once, not once for each stage.
  static_assert(C::kStages == 2);
  auto k_lane = keys_as_columns<C::kHeadDim>(ptx::smem_addr(smem.k));
  auto v_lane = keys_summed_over<C::kHeadDim>(ptx::smem_addr(smem.v));
  const int64_t row = first_row + threadIdx.x / 32 * kWarpRows + warp.lane / 4;
  const auto masked_scores = [&](int j, float (&s)[C::kTileK / 8][4]) {
    warp.scores(q, k_lane, s);
    const int64_t from = int64_t{j} * C::kTileK;
    if (from + C::kTileK > (p.causal ? min(first_row + 1 + offset, shape.seq_k) : shape.seq_k)) {
      const int64_t end = shape.seq_k - from, diagonal = row + 1 + offset - from;
      warp.mask(s, {tile_limit(p.causal ? min(end, diagonal) : end),
                    tile_limit(p.causal ? min(end, diagonal + 8) : end)});
    }
  };
  // Calls body(j) with tile j in its stage while tile j + 1 is on its way.
  const auto for_each_tile = [&](auto load, auto body) {
    __syncthreads();  // nobody reads the stages any more
    if (tiles_k > 0) load(0);
    ptx::cp_async_commit_group();
    for (int j = 0; j < tiles_k; ++j) {
      ptx::cp_async_wait_group<0>();
      __syncthreads();  // tile j has landed for everyone, and nobody reads the other stage any more
      if (j + 1 < tiles_k) load(j + 1);
      ptx::cp_async_commit_group();
      body(j);
      const int other_stage = j % 2 ? -kStageBytes : kStageBytes;
      k_lane.move(other_stage), v_lane.move(other_stage);
    }
  };

  tile::RowLoader<C::kHeadDim, C::kTileQ, C::kThreads, tile::NaturalRows, Quantized>(
      head_pointer<Quantized>(p.q, b, h) + first_row * p.q.stride_s, p.q.stride_s)
      .load(ptx::smem_addr(smem.q), tile_limit(shape.seq_q - first_row));
  if constexpr (kRecipe == Recipe::kCudnn) {
    for_each_tile(load_k, [&](int j) {
      float s[C::kTileK / 8][4], block_max[2];
      masked_scores(j, s);
      warp.block_maxima(s, args.scale_log2, block_max);
      warp.raise_exponents(block_max);
    });
    k_loader.restart(k);
    k_lane = keys_as_columns<C::kHeadDim>(ptx::smem_addr(smem.k));
    v_lane = keys_summed_over<C::kHeadDim>(ptx::smem_addr(smem.v));
  }
  for_each_tile(load_kv, [&](int j) {
    float s[C::kTileK / 8][4], block_max[2];
    masked_scores(j, s);
    warp.block_maxima(s, args.scale_log2, block_max);
    if constexpr (kRecipe != Recipe::kCudnn) warp.raise_exponents(block_max);
    uint32_t packed[Warp::kPTiles][2], quantized[Warp::kQuantizedTiles][2];
    warp.probabilities(s, args.scale_log2, block_max, packed, quantized);
    warp.accumulate(v_lane, packed, quantized);
  });
  warp.store_rows(p, b, h, first_row);
}

template <class C, class T, Recipe kRecipe, bool kTraining>
cudaError_t launch(const ForwardParams& p, cudaStream_t stream) {
  const int64_t tiles_q = (p.shape.seq_q + C::kTileQ - 1) / C::kTileQ;
  const ForwardArgs args{p, static_cast<int>(tiles_q), scale_log2(p.softmax_scale)};
  return launch_tiles<C, ForwardSmem<C, T>>(forward_kernel<C, T, kRecipe, kTraining>, args,
                                            tiles_q * p.shape.batch * p.shape.heads_q, stream);
}

template <class C, class T>
cudaError_t launch_recipe(const ForwardParams& p, cudaStream_t stream) {
  const bool training = p.training();
  switch (p.recipe) {
    case Recipe::kCudnn:
      return training ? launch<C, T, Recipe::kCudnn, true>(p, stream) : cudaErrorInvalidValue;
    case Recipe::kFp4:
      return training ? launch<C, T, Recipe::kFp4, true>(p, stream)
                      : launch<C, T, Recipe::kFp4, false>(p, stream);
    case Recipe::kFp4Qk:
      return training ? launch<C, T, Recipe::kFp4Qk, true>(p, stream)
                      : launch<C, T, Recipe::kFp4Qk, false>(p, stream);
  }
  return cudaErrorInvalidValue;
}

template <class T>
cudaError_t launch_head_dim(const ForwardParams& p, cudaStream_t stream) {
  if (p.shape.head_dim == 64) return launch_recipe<ForwardConfig<64>, T>(p, stream);
  return launch_recipe<ForwardConfig<128>, T>(p, stream);
}

}  // namespace

cudaError_t launch_forward(const ForwardParams& p, cudaStream_t stream) {
  return p.dtype == DType::kFloat16 ? launch_head_dim<__half>(p, stream)
                                    : launch_head_dim<__nv_bfloat16>(p, stream);
}

}  // namespace attn_qat::mma_sync
