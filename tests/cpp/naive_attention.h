// The attention of the contract as plain loops in double: one query row at a time, no tiles, no online
// softmax. Which FP4 code a value gets is decided on its FP32 value, as everywhere.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "format/nvfp4.h"
#include "params.h"

namespace attn_qat::testing {

using Values = std::vector<float>;  // (b, h, s, d) order
using Doubles = std::vector<double>;

// x[start + i * stride] for i < length, in blocks of 16; a short last block counts as padded with zeros.
template <class Vector>
void fake_quantize_line(Vector& x, int64_t start, int64_t stride, int64_t length) {
  for (int64_t from = 0; from < length; from += nvfp4::kBlock) {
    const int64_t to = std::min<int64_t>(length, from + nvfp4::kBlock);
    const auto value = [&](int64_t i) -> auto& { return x[static_cast<size_t>(start + i * stride)]; };
    uint32_t amax = 0;
    for (int64_t i = from; i < to; ++i)
      amax = std::max(amax, nvfp4::magnitude_bits(static_cast<float>(value(i))));
    const float scale = nvfp4::block_scale(amax);
    for (int64_t i = from; i < to; ++i) value(i) = nvfp4::fake_quantize(static_cast<float>(value(i)), scale);
  }
}

// Along the head dimension.
inline Values quantized_rows(Values x, int64_t head_dim) {
  for (int64_t row = 0; row < static_cast<int64_t>(x.size()); row += head_dim)
    fake_quantize_line(x, row, 1, head_dim);
  return x;
}

// Along the sequence.
inline Values quantized_columns(Values x, int64_t seq, int64_t head_dim) {
  for (int64_t head = 0; head < static_cast<int64_t>(x.size()); head += seq * head_dim)
    for (int64_t d = 0; d < head_dim; ++d) fake_quantize_line(x, head + d, head_dim, seq);
  return x;
}

class NaiveAttention {
  template <class Vector>
  auto& at(Vector& x, int64_t row, int64_t d) const {
    return x[static_cast<size_t>(row * s_.head_dim + d)];
  }

 public:
  // q, k, v hold values that the dtype of the kernel under test represents.
  NaiveAttention(const AttentionShape& shape, bool causal, float softmax_scale, Recipe recipe,
                 const Values& q, const Values& k, const Values& v)
      : s_(shape),
        causal_(causal),
        scale_(softmax_scale),
        recipe_(recipe),
        q_(quantized_rows(q, shape.head_dim)),
        k_(quantized_rows(k, shape.head_dim)),
        v_(v) {
    if (recipe == Recipe::kCudnn) v_ = quantized_rows(v, shape.head_dim);
    if (recipe == Recipe::kFp4) v_ = quantized_columns(v, shape.seq_k, shape.head_dim);
  }

  Doubles out, high_precision_out, lse;  // filled by forward
  Doubles dq, dk, dv;                    // filled by backward
  std::vector<int32_t> row_exponent;

  void forward() {
    const size_t rows = static_cast<size_t>(s_.batch * s_.heads_q * s_.seq_q),
                 width = static_cast<size_t>(s_.head_dim);
    out.assign(rows * width, 0.0), high_precision_out = out;
    lse.assign(rows, -INFINITY), row_exponent.assign(rows, INT32_MIN);
    for_each_row([&](int64_t row, int64_t kv_head, int64_t i) {
      const Row r = attend(row, kv_head, i);
      if (r.keys == 0) return;
      lse[static_cast<size_t>(row)] = r.lse;
      row_exponent[static_cast<size_t>(row)] = static_cast<int32_t>(r.exponent);
      for (int64_t j = 0; j < r.keys; ++j)
        for (int64_t d = 0; d < s_.head_dim; ++d) {
          at(high_precision_out, row, d) += r.p[static_cast<size_t>(j)] * at(v_, kv_row(kv_head, j), d);
          at(out, row, d) += r.p_hat[static_cast<size_t>(j)] * at(v_, kv_row(kv_head, j), d);
        }
    });
  }

  // After forward, whose double outputs are the saved statistics.
  void backward(const Values& grad_out) {
    dq.assign(q_.size(), 0.0), dk.assign(k_.size(), 0.0), dv.assign(k_.size(), 0.0);
    for_each_row([&](int64_t row, int64_t kv_head, int64_t i) {
      Row r = attend(row, kv_head, i);
      if (recipe_ == Recipe::kCudnn) r.p_hat = quantized_row(r.p, 0);  // normalised, local scales
      double delta = 0;
      for (int64_t d = 0; d < s_.head_dim; ++d)
        delta += at(high_precision_out, row, d) * at(grad_out, row, d);
      for (int64_t j = 0; j < r.keys; ++j) {
        const int64_t key = kv_row(kv_head, j);
        const double dp = dot(grad_out, row, v_, key);
        const double ds = round_to_bfloat16(static_cast<float>(r.p[static_cast<size_t>(j)] * (dp - delta)));
        for (int64_t d = 0; d < s_.head_dim; ++d) {
          at(dq, row, d) += scale_ * ds * at(k_, key, d);
          at(dk, key, d) += scale_ * ds * at(q_, row, d);
          at(dv, key, d) += r.p_hat[static_cast<size_t>(j)] * at(grad_out, row, d);
        }
      }
    });
  }

 private:
  struct Row {
    int64_t keys;   // visible ones: 0 .. keys - 1
    Doubles p;      // normalised
    Doubles p_hat;  // quantised against 2^exponent
    double exponent, lse;
  };

  template <class Body>
  void for_each_row(Body body) const {
    const int64_t group = s_.heads_q / s_.heads_kv;
    for (int64_t row = 0; row < s_.batch * s_.heads_q * s_.seq_q; ++row) {
      const int64_t head = row / s_.seq_q, b = head / s_.heads_q, h = head % s_.heads_q;
      body(row, b * s_.heads_kv + h / group, row % s_.seq_q);
    }
  }

  int64_t kv_row(int64_t kv_head, int64_t j) const { return kv_head * s_.seq_k + j; }

  double dot(const Values& a, int64_t row_a, const Values& b, int64_t row_b) const {
    double sum = 0;
    for (int64_t d = 0; d < s_.head_dim; ++d) sum += static_cast<double>(at(a, row_a, d)) * at(b, row_b, d);
    return sum;
  }

  // fp4(x * 2^gain) * 2^-gain
  static Doubles quantized_row(Doubles x, int gain) {
    const double up = std::exp2(gain);
    for (double& value : x) value *= up;
    fake_quantize_line(x, 0, 1, static_cast<int64_t>(x.size()));
    for (double& value : x) value /= up;
    return x;
  }

  Row attend(int64_t row, int64_t kv_head, int64_t i) const {
    Row r{causal_ ? std::clamp<int64_t>(i + 1 + s_.seq_k - s_.seq_q, 0, s_.seq_k) : s_.seq_k,
          {},
          {},
          0,
          -INFINITY};
    if (r.keys == 0) return r;
    double top = -INFINITY, sum = 0;
    for (int64_t j = 0; j < r.keys; ++j) {
      const double t = dot(q_, row, k_, kv_row(kv_head, j)) * scale_ * 1.4426950408889634;
      r.p.push_back(static_cast<double>(static_cast<float>(t)));  // t is an FP32 number by contract
      top = std::max(top, r.p.back());
    }
    r.exponent = std::ceil(top);
    for (double& p : r.p) sum += p = std::exp2(p - r.exponent);
    r.lse = (r.exponent + std::log2(sum)) * 0.6931471805599453;
    r.p_hat = recipe_ == Recipe::kFp4Qk ? r.p : quantized_row(r.p, probability_gain(recipe_));
    for (double& p : r.p) p /= sum;
    for (double& p : r.p_hat) p /= sum;
    return r;
  }

  AttentionShape s_;
  bool causal_;
  double scale_;
  Recipe recipe_;
  Values q_, k_, v_;
};

}  // namespace attn_qat::testing
