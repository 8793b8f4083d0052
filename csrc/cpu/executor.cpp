#include "cpu.h"

namespace attn_qat::cpu {

Executor serial_executor() {
  return {1, [](int workers, void (*body)(void*, int), void* context) {
            for (int worker = 0; worker < workers; ++worker) body(context, worker);
          }};
}

}  // namespace attn_qat::cpu
