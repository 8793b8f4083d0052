// Entry points of the CPU kernels. They allocate nothing: scratch comes in as a workspace, threads as an
// Executor.
#pragma once
#include <atomic>

#include "../params.h"

namespace attn_qat::cpu {

// Runs body(context, i) for i < workers, each on a thread of its own if there are that many.
struct Executor {
  int workers;
  void (*run)(int workers, void (*body)(void* context, int worker), void* context);
};

Executor serial_executor();

// Calls task(worker, i) for each i < count, handing the tasks out in order as workers become free.
template <class Task>
void for_each_task(const Executor& executor, int64_t count, Task&& task) {
  const int workers = count < executor.workers ? static_cast<int>(count) : executor.workers;
  if (workers <= 1) {
    for (int64_t i = 0; i < count; ++i) task(0, i);
    return;
  }
  struct Shared {
    std::atomic<int64_t> next;
    int64_t count;
    Task* task;
  } shared{{0}, count, &task};
  executor.run(
      workers,
      [](void* context, int worker) {
        auto* s = static_cast<Shared*>(context);
        for (int64_t i; (i = s->next.fetch_add(1, std::memory_order_relaxed)) < s->count;)
          (*s->task)(worker, i);
      },
      &shared);
}

// Bytes of workspace, 64-byte aligned, that a call needs for this many workers. Results do not depend on the
// workers.
size_t forward_workspace_bytes(const AttentionShape&, int workers);
size_t backward_workspace_bytes(const AttentionShape&, int workers);

void fake_quantize(const QuantizeParams&, const Executor&);
void quantize(const QuantizeParams&, const Executor&);
void dequantize(const QuantizeParams&, const Executor&);
void forward(const ForwardParams&, void* workspace, const Executor&);
void preprocess(const PreprocessParams&, const Executor&);
void backward(const BackwardParams&, void* workspace, const Executor&);

}  // namespace attn_qat::cpu
