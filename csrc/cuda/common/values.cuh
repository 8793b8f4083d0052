// Values of a tensor in registers, for the kernels that quantise tensors.
//
// They stay as they came, in 32-bit words of one FP32 or two 16-bit values, while magnitudes are compared:
// without their signs the bits order like the magnitudes, with NaN and Inf above all others.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "format/nvfp4.h"

namespace attn_qat::common {

template <class T>
inline constexpr int kPerWord = 4 / static_cast<int>(sizeof(T));
template <class T>
inline constexpr uint32_t kSignBits = sizeof(T) == 2 ? 0x80008000u : 0x80000000u;

template <class T>
__device__ __forceinline__ void unpack(uint32_t word, float (&x)[kPerWord<T>]) {
  if constexpr (std::is_same_v<T, float>) {
    x[0] = bits_float(word);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    x[0] = bits_float(word << 16), x[1] = bits_float(word & 0xffff0000u);
  } else {
    const float2 pair = __half22float2(reinterpret_cast<const __half2&>(word));
    x[0] = pair.x, x[1] = pair.y;
  }
}

// Rounded to nearest even.
template <class T>
__device__ __forceinline__ uint32_t pack(const float (&x)[kPerWord<T>]) {
  if constexpr (std::is_same_v<T, float>) {
    return float_bits(x[0]);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x[0], x[1]);
    return reinterpret_cast<const uint32_t&>(pair);
  } else {
    const __half2 pair = __floats2half2_rn(x[0], x[1]);
    return reinterpret_cast<const uint32_t&>(pair);
  }
}

// Value by value the larger of two words of magnitudes.
template <class T>
__device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) {
  return sizeof(T) == 2 ? __vmaxu2(a, b) : max(a, b);
}

template <int kBytes>
using Word = std::conditional_t<
    kBytes == 8, uint2,
    std::conditional_t<kBytes == 4, uint32_t, std::conditional_t<kBytes == 2, uint16_t, uint8_t>>>;

// What a lane holds of a row at a time: one value, or kWords words, which move 16 bytes at once.
template <class T, int kWords_>
struct Chunk {
  static constexpr int kWords = kWords_, kFloats = kWords * kPerWord<T>;
  static constexpr int kValues = kWords == 1 ? 1 : kFloats;  // one value leaves the rest of its word zero
  static constexpr int kLanes = nvfp4::kBlock / kValues;     // that share a block along the row
  uint32_t words[kWords];

  __device__ __forceinline__ static Chunk load(const T* from) {
    Chunk chunk;
    if constexpr (kWords == 1) {
      chunk.words[0] = *reinterpret_cast<const Word<sizeof(T)>*>(from);
    } else {
#pragma unroll
      for (int i = 0; i < kWords; i += 4) {
        const uint4 quad = __ldg(reinterpret_cast<const uint4*>(from) + i / 4);
        chunk.words[i] = quad.x, chunk.words[i + 1] = quad.y;
        chunk.words[i + 2] = quad.z, chunk.words[i + 3] = quad.w;
      }
    }
    return chunk;
  }

  // __stcg, because the compiler may split a plain store.
  __device__ __forceinline__ void store(T* to) const {
    if constexpr (kWords == 1) {
      *reinterpret_cast<Word<sizeof(T)>*>(to) = static_cast<Word<sizeof(T)>>(words[0]);
    } else {
#pragma unroll
      for (int i = 0; i < kWords; i += 4)
        __stcg(reinterpret_cast<uint4*>(to) + i / 4,
               make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]));
    }
  }

  __device__ __forceinline__ void to_floats(float (&x)[kFloats]) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      float word[kPerWord<T>];
      unpack<T>(words[i], word);
#pragma unroll
      for (int j = 0; j < kPerWord<T>; ++j) x[i * kPerWord<T> + j] = word[j];
    }
  }

  __device__ __forceinline__ static Chunk from_floats(const float (&x)[kFloats]) {
    Chunk chunk;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      float word[kPerWord<T>];
#pragma unroll
      for (int j = 0; j < kPerWord<T>; ++j) word[j] = x[i * kPerWord<T> + j];
      chunk.words[i] = pack<T>(word);
    }
    return chunk;
  }
};

// Bits, as FP32, of the largest magnitude in a block along the row: the same in all lanes that share it. The
// whole warp takes part.
template <class T, int kWords>
__device__ __forceinline__ uint32_t amax_bits(const Chunk<T, kWords>& chunk) {
  uint32_t amax = chunk.words[0] & ~kSignBits<T>;
#pragma unroll
  for (int i = 1; i < kWords; ++i) amax = larger<T>(amax, chunk.words[i] & ~kSignBits<T>);
#pragma unroll
  for (int step = 1; step < Chunk<T, kWords>::kLanes; step *= 2)
    amax = larger<T>(amax, __shfl_xor_sync(0xffffffffu, amax, step));
  float x[kPerWord<T>];
  unpack<T>(amax, x);
  return max(float_bits(x[0]), float_bits(x[kPerWord<T> - 1]));
}

// The same of a block down the rows: one for each of the columns that word `word` of every chunk holds.
template <class T, int kWords>
__device__ __forceinline__ void column_amax(const Chunk<T, kWords> (&rows)[nvfp4::kBlock], int word,
                                            float (&amax)[kPerWord<T>]) {
  uint32_t largest = rows[0].words[word] & ~kSignBits<T>;
#pragma unroll
  for (int r = 1; r < nvfp4::kBlock; ++r) largest = larger<T>(largest, rows[r].words[word] & ~kSignBits<T>);
  unpack<T>(largest, amax);
}

// The global scale g: x / g is what is quantised, and g multiplies what is decoded. Division is monotonic, so
// the largest |x| / g is that of the largest |x|, bit for bit.
template <int N>
__device__ __forceinline__ void divide(float (&x)[N], const float* global_scale) {
  if (!global_scale) return;
  const float g = *global_scale;
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = __fdiv_rn(x[i], g);
}

__device__ __forceinline__ uint32_t divide_bits(uint32_t amax_bits, const float* global_scale) {
  return global_scale ? float_bits(__fdiv_rn(bits_float(amax_bits), *global_scale)) : amax_bits;
}

template <int N>
__device__ __forceinline__ void multiply(float (&x)[N], const float* global_scale) {
  if (!global_scale) return;
  const float g = *global_scale;
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = __fmul_rn(x[i], g);
}

}  // namespace attn_qat::common
