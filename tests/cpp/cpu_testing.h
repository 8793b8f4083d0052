// Shared by the tests of the CPU kernels: reproducible numbers, poisoned buffers, a thread executor.
#pragma once
#include <cmath>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

#include "cpu/cpu.h"
#include "format/float_types.h"

namespace attn_qat::testing {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

// Normal numbers that are the same everywhere: an LCG and the sum of twelve uniforms.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 2 + 1) {}
  float uniform() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<float>(state_ >> 40) * 0x1p-24f;
  }
  float normal() {
    float sum = -6.0f;
    for (int i = 0; i < 12; ++i) sum += uniform();
    return sum;
  }
  std::vector<float> normals(int64_t count) {
    std::vector<float> x(static_cast<size_t>(count));
    for (float& value : x) value = normal();
    return x;
  }

 private:
  uint64_t state_;
};

// Each worker on a thread of its own.
template <int kWorkers>
cpu::Executor thread_executor() {
  return {kWorkers, [](int workers, void (*body)(void*, int), void* context) {
            std::vector<std::thread> threads;
            for (int worker = 0; worker < workers; ++worker) threads.emplace_back(body, context, worker);
            for (std::thread& thread : threads) thread.join();
          }};
}

// A 64-byte aligned workspace full of NaN, followed by guard bytes.
class Workspace {
 public:
  explicit Workspace(size_t bytes) : bytes_(bytes), memory_(bytes + kGuard + 64, 0xff) {
    std::memset(data() + bytes_, kGuardByte, kGuard);
  }
  uint8_t* data() {
    const auto address = reinterpret_cast<uintptr_t>(memory_.data());
    return memory_.data() + (64 - address % 64) % 64;
  }
  bool guard_is_intact() {
    for (size_t i = 0; i < kGuard; ++i)
      if (data()[bytes_ + i] != kGuardByte) return false;
    return true;
  }

 private:
  static constexpr size_t kGuard = 4096;
  static constexpr uint8_t kGuardByte = 0xa5;
  size_t bytes_;
  std::vector<uint8_t> memory_;
};

// The i-th element of an array of dtype.
inline float read_value(const void* array, DType dtype, int64_t i) {
  const char* at = static_cast<const char*>(array) + i * dtype_bytes(dtype);
  float x;
  uint16_t half;
  if (dtype == DType::kFloat32) return std::memcpy(&x, at, 4), x;
  std::memcpy(&half, at, 2);
  return dtype == DType::kBFloat16 ? bfloat16_to_float(half) : float16_to_float(half);
}

inline void write_value(void* array, DType dtype, int64_t i, float x) {
  char* at = static_cast<char*>(array) + i * dtype_bytes(dtype);
  const uint16_t half = dtype == DType::kBFloat16 ? float_to_bfloat16(x) : float_to_float16(x);
  if (dtype == DType::kFloat32)
    std::memcpy(at, &x, 4);
  else
    std::memcpy(at, &half, 2);
}

// A (batch, heads, seq, head_dim) operand whose memory lies as (batch, seq, heads, head_dim) with a gap after
// every row, so that wrong strides and stray writes show.
class Operand {
 public:
  Operand(DType dtype, int64_t batch, int64_t heads, int64_t seq, int64_t head_dim)
      : dtype_(dtype),
        batch_(batch),
        heads_(heads),
        seq_(seq),
        head_dim_(head_dim),
        row_(head_dim + kGap),
        memory_(static_cast<size_t>((batch * seq * heads + 1) * row_ * dtype_bytes(dtype)), kFill) {}

  View view() { return {memory_.data(), seq_ * heads_ * row_, row_, heads_ * row_}; }
  int64_t count() const { return batch_ * heads_ * seq_ * head_dim_; }

  // Values in (b, h, s, d) order, rounded to the dtype on the way in.
  void set(const std::vector<float>& values) {
    for (int64_t i = 0; i < count(); ++i)
      write_value(memory_.data(), dtype_, offset(i), values[static_cast<size_t>(i)]);
  }
  std::vector<float> values() const {
    std::vector<float> x(static_cast<size_t>(count()));
    for (int64_t i = 0; i < count(); ++i)
      x[static_cast<size_t>(i)] = read_value(memory_.data(), dtype_, offset(i));
    return x;
  }
  bool gaps_are_intact() const {
    const int64_t rows = batch_ * heads_ * seq_, begin = head_dim_ * dtype_bytes(dtype_);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t byte = begin; byte < row_ * dtype_bytes(dtype_); ++byte)
        if (memory_[static_cast<size_t>(r * row_ * dtype_bytes(dtype_) + byte)] != kFill) return false;
    for (size_t byte = static_cast<size_t>(rows * row_ * dtype_bytes(dtype_)); byte < memory_.size(); ++byte)
      if (memory_[byte] != kFill) return false;
    return true;
  }
  friend bool operator==(const Operand& a, const Operand& b) { return a.memory_ == b.memory_; }

 private:
  static constexpr int64_t kGap = 8;
  static constexpr uint8_t kFill = 0xff;  // NaN in every dtype

  int64_t offset(int64_t i) const {
    const int64_t d = i % head_dim_, s = i / head_dim_ % seq_, h = i / (head_dim_ * seq_) % heads_;
    const int64_t b = i / (head_dim_ * seq_ * heads_);
    return ((b * seq_ + s) * heads_ + h) * row_ + d;
  }

  DType dtype_;
  int64_t batch_, heads_, seq_, head_dim_, row_;
  std::vector<uint8_t> memory_;
};

// ||got - want|| / ||want||; NaN anywhere gives NaN, 0 / 0 gives 0.
template <class Want>
double relative_error(const std::vector<float>& got, const std::vector<Want>& want) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    difference += std::pow(static_cast<double>(got[i]) - want[i], 2);
    norm += std::pow(static_cast<double>(want[i]), 2);
  }
  return difference == 0 ? 0.0 : std::sqrt(difference / norm);
}

}  // namespace attn_qat::testing
