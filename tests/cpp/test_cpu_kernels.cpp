// Forward and backward of the CPU against plain loops in double, and what they promise about threads and
// memory.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <tuple>

#include "cpu_testing.h"
#include "naive_attention.h"

namespace attn_qat::cpu {
namespace {

using attn_qat::testing::kNaN;
using attn_qat::testing::NaiveAttention;
using attn_qat::testing::Operand;
using attn_qat::testing::Random;
using attn_qat::testing::relative_error;
using attn_qat::testing::thread_executor;
using attn_qat::testing::Workspace;

constexpr double kBound = 6e-3, kLseBound = 1e-5;  // contract section 7

const Executor kExecutors[] = {serial_executor(),    thread_executor<1>(), thread_executor<2>(),
                               thread_executor<3>(), thread_executor<4>(), thread_executor<5>()};

struct Problem {
  const char* name;
  AttentionShape shape;  // batch, heads_q, heads_kv, seq_q, seq_k, head_dim
  bool causal;
  DType dtype;
};

constexpr Problem kProblems[] = {
    {"OneToken", {1, 1, 1, 1, 1, 128}, false, DType::kBFloat16},
    {"WholeTiles", {1, 2, 2, 64, 128, 64}, false, DType::kBFloat16},
    {"Tails", {2, 1, 1, 65, 129, 64}, false, DType::kBFloat16},
    {"TailsCausal", {1, 2, 2, 129, 129, 128}, true, DType::kBFloat16},
    {"GroupedHeads", {1, 4, 2, 70, 50, 64}, false, DType::kBFloat16},
    {"OneKvHeadCausal", {2, 3, 1, 67, 200, 48}, true, DType::kBFloat16},
    {"RowsWithoutKeys", {1, 2, 2, 150, 40, 64}, true, DType::kBFloat16},
    {"Float16", {1, 2, 1, 81, 97, 64}, true, DType::kFloat16},
    {"Float32", {1, 2, 1, 81, 97, 64}, true, DType::kFloat32},
    {"SmallestHead", {1, 1, 1, 33, 17, 16}, false, DType::kFloat32},
    {"LargestHead", {1, 1, 1, 40, 70, 256}, true, DType::kBFloat16},
};
// Long enough that several workers share one head.
constexpr Problem kLong = {"Long", {1, 2, 1, 700, 900, 64}, true, DType::kBFloat16};

// The tensors of one problem and the calls on them. Outputs start as NaN; workspaces are poisoned and
// guarded.
struct Attention {
  Problem p;
  Recipe recipe;
  float softmax_scale = 0.11f;
  Operand q, k, v, grad_out, out, high_precision_out, dq, dk, dv;
  std::vector<float> lse, delta;
  std::vector<int32_t> row_exponent;

  Attention(const Problem& problem, Recipe r)
      : p(problem), recipe(r), q(query()), k(key()), v(key()), grad_out(query()), out(query()),
        high_precision_out(query()), dq(query()), dk(key()), dv(key()), lse(rows(), kNaN),
        delta(rows(), kNaN), row_exponent(rows(), 12345) {
    Random random(7);
    for (Operand* x : {&q, &k, &v, &grad_out}) x->set(random.normals(x->count()));
  }

  size_t rows() const { return static_cast<size_t>(p.shape.batch * p.shape.heads_q * p.shape.seq_q); }

  void forward(const Executor& executor = serial_executor()) {
    Workspace workspace(forward_workspace_bytes(p.shape, executor.workers));
    cpu::forward({q.view(), k.view(), v.view(), out.view(), high_precision_out.view(), lse.data(),
                  row_exponent.data(), p.shape, softmax_scale, p.causal, recipe, p.dtype},
                 workspace.data(), executor);
    EXPECT_TRUE(workspace.guard_is_intact());
    EXPECT_TRUE(out.gaps_are_intact() && high_precision_out.gaps_are_intact());
  }

  BackwardParams backward_params() {
    return {grad_out.view(),
            q.view(),
            k.view(),
            v.view(),
            high_precision_out.view(),
            dq.view(),
            dk.view(),
            dv.view(),
            lse.data(),
            nullptr,
            row_exponent.data(),
            p.shape,
            softmax_scale,
            p.causal,
            true,
            recipe,
            p.dtype};
  }

  void backward(const Executor& executor = serial_executor()) { backward(backward_params(), executor); }

  void backward(const BackwardParams& params, const Executor& executor = serial_executor()) {
    Workspace workspace(backward_workspace_bytes(p.shape, executor.workers));
    cpu::backward(params, workspace.data(), executor);
    EXPECT_TRUE(workspace.guard_is_intact());
    EXPECT_TRUE(dq.gaps_are_intact() && dk.gaps_are_intact() && dv.gaps_are_intact());
  }

  NaiveAttention naive() const {
    NaiveAttention want(p.shape, p.causal, softmax_scale, recipe, q.values(), k.values(), v.values());
    want.forward();
    return want;
  }

 private:
  Operand query() const { return {p.dtype, p.shape.batch, p.shape.heads_q, p.shape.seq_q, p.shape.head_dim}; }
  Operand key() const { return {p.dtype, p.shape.batch, p.shape.heads_kv, p.shape.seq_k, p.shape.head_dim}; }
};

// With a single key dQ and dK are zero but for the rounding of dP - delta.
void expect_close(const Operand& got, const std::vector<double>& want) {
  if (std::all_of(want.begin(), want.end(), [](double x) { return x == 0; })) {
    for (float x : got.values()) ASSERT_LE(std::fabs(x), 1e-4);
  } else {
    EXPECT_LE(relative_error(got.values(), want), kBound);
  }
}

void expect_same_bits(const Attention& got, const Attention& want) {
  EXPECT_TRUE(got.out == want.out);
  EXPECT_TRUE(got.high_precision_out == want.high_precision_out);
  EXPECT_EQ(got.lse, want.lse);
  EXPECT_EQ(got.row_exponent, want.row_exponent);
  EXPECT_TRUE(got.dq == want.dq);
  EXPECT_TRUE(got.dk == want.dk);
  EXPECT_TRUE(got.dv == want.dv);
}

const char* const kRecipeNames[] = {"Cudnn", "Fp4", "Fp4Qk"};

class CpuKernels : public ::testing::TestWithParam<std::tuple<Problem, Recipe>> {
 protected:
  Attention make() const { return {std::get<0>(GetParam()), std::get<1>(GetParam())}; }
};

void PrintTo(const std::tuple<Problem, Recipe>& p, std::ostream* os) { *os << std::get<0>(p).name; }

INSTANTIATE_TEST_SUITE_P(All, CpuKernels,
                         ::testing::Combine(::testing::ValuesIn(kProblems),
                                            ::testing::Values(Recipe::kCudnn, Recipe::kFp4, Recipe::kFp4Qk)),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param).name) +
                                  kRecipeNames[static_cast<int>(std::get<1>(info.param))];
                         });

TEST_P(CpuKernels, ForwardIsTheFormula) {
  Attention attention = make();
  attention.forward();
  const NaiveAttention want = attention.naive();
  expect_close(attention.out, want.out);
  expect_close(attention.high_precision_out, want.high_precision_out);
  for (size_t i = 0; i < attention.rows(); ++i) {
    if (std::isinf(want.lse[i]))
      EXPECT_EQ(attention.lse[i], -INFINITY) << "row " << i;
    else
      EXPECT_NEAR(attention.lse[i], want.lse[i], kLseBound) << "row " << i;
  }
  EXPECT_EQ(attention.row_exponent, want.row_exponent);
}

TEST_P(CpuKernels, BackwardIsTheFormula) {
  Attention attention = make();
  attention.forward();
  attention.backward();
  NaiveAttention want = attention.naive();
  want.backward(attention.grad_out.values());
  expect_close(attention.dq, want.dq);
  expect_close(attention.dk, want.dk);
  expect_close(attention.dv, want.dv);
}

TEST_P(CpuKernels, AnyNumberOfThreadsGivesTheSameBits) {
  Attention want = make();
  want.forward();
  want.backward();
  for (const Executor& executor : kExecutors) {
    Attention got = make();
    got.forward(executor);
    got.backward(executor);
    expect_same_bits(got, want);
  }
}

TEST(CpuKernelsLong, AnyNumberOfThreadsGivesTheSameBits) {
  for (Recipe recipe : {Recipe::kCudnn, Recipe::kFp4, Recipe::kFp4Qk}) {
    Attention want(kLong, recipe);
    want.forward();
    want.backward();
    for (const Executor& executor : kExecutors) {
      Attention got(kLong, recipe);
      got.forward(executor);
      got.backward(executor);
      expect_same_bits(got, want);
    }
  }
}

TEST_P(CpuKernels, DqAndDkDvAloneHaveTheBitsOfTheWhole) {
  Attention want = make();
  want.forward();
  want.backward();
  for (const Executor& executor : {kExecutors[0], kExecutors[3]}) {
    Attention got = make();
    got.forward();
    BackwardParams dq_only = got.backward_params(), dkdv_only = dq_only;
    dq_only.dk.data = dq_only.dv.data = nullptr;
    dkdv_only.dq.data = nullptr;
    got.backward(dq_only, executor);
    EXPECT_TRUE(got.dk == make().dk && got.dv == make().dv) << "an output that was not asked for";
    got.backward(dkdv_only, executor);
    expect_same_bits(got, want);
  }
}

TEST_P(CpuKernels, DeltaFromPreprocessGivesTheSameBits) {
  Attention want = make(), got = make();
  want.forward(), got.forward();
  want.backward();
  const AttentionShape& s = got.p.shape;
  preprocess({got.high_precision_out.view(), got.grad_out.view(), got.delta.data(), s.batch, s.heads_q,
              s.seq_q, s.head_dim, got.p.dtype},
             thread_executor<3>());
  BackwardParams params = got.backward_params();
  params.delta = got.delta.data();
  params.high_precision_out.data = nullptr;
  got.backward(params);
  expect_same_bits(got, want);
}

// What the block format does with NaN must reach the caller, and nobody else.
TEST_P(CpuKernels, ANaNInOneQueryRowStaysInThatRow) {
  Attention attention = make();
  const size_t width = static_cast<size_t>(attention.p.shape.head_dim), last = attention.rows() - 1;
  std::vector<float> q = attention.q.values();
  q[last * width + 3] = kNaN;
  attention.q.set(q);
  attention.forward();
  attention.backward();
  EXPECT_TRUE(std::isnan(attention.lse[last]));
  const std::vector<float> out = attention.out.values(), dq = attention.dq.values();
  for (size_t i = 0; i < out.size(); ++i) {
    EXPECT_EQ(std::isnan(out[i]), i / width == last) << "out " << i;
    EXPECT_EQ(std::isnan(dq[i]), i / width == last) << "dq " << i;
  }
}

// seq_q or seq_k of 0: zeros where there is something to write, no access to the missing operands.
TEST(CpuKernelsEmpty, NoKeysAndNoQueries) {
  for (Recipe recipe : {Recipe::kCudnn, Recipe::kFp4, Recipe::kFp4Qk})
    for (const Executor& executor : {kExecutors[0], kExecutors[2]}) {
      Attention no_keys({"", {1, 2, 1, 5, 0, 64}, false, DType::kBFloat16}, recipe);
      no_keys.forward(executor);
      no_keys.backward(executor);
      EXPECT_EQ(no_keys.out.values(), std::vector<float>(5 * 2 * 64, 0.0f));
      EXPECT_EQ(no_keys.dq.values(), std::vector<float>(5 * 2 * 64, 0.0f));
      EXPECT_EQ(no_keys.lse, std::vector<float>(10, -INFINITY));
      EXPECT_EQ(no_keys.row_exponent, std::vector<int32_t>(10, INT32_MIN));

      Attention no_queries({"", {1, 2, 1, 0, 7, 64}, true, DType::kBFloat16}, recipe);
      no_queries.forward(executor);
      no_queries.backward(executor);
      EXPECT_EQ(no_queries.dk.values(), std::vector<float>(7 * 64, 0.0f));
      EXPECT_EQ(no_queries.dv.values(), std::vector<float>(7 * 64, 0.0f));
    }
}

}  // namespace
}  // namespace attn_qat::cpu
