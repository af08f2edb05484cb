// Threads, scratch memory and the choice of an instruction set. Compiled once, for the baseline.

#include "runtime.h"

#include <csetjmp>
#include <cstdio>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace turbogr {
namespace {

using RangeFunction = void (*)(int64_t, int64_t, void*);
using ParallelFor = int32_t (*)(int64_t, int64_t, int64_t, RangeFunction, void*);
using NumThreads = int32_t (*)(uint32_t*);

ParallelFor parallel_for_of_torch = nullptr;
NumThreads num_threads_of_torch = nullptr;
Bf16Unit unit_in_use = Bf16Unit::none;

struct Work {
  void (*task)(int64_t, void*);
  void* context;
  int64_t num_tasks;
  int64_t next;
  bool out_of_memory;
};

// Where a task of this thread that finds no memory leaves it; null outside of tasks.
thread_local std::jmp_buf* leave_task = nullptr;

// Whether a task of the kernel that this thread has called found no memory.
thread_local bool out_of_memory = false;

size_t most_scratch = SIZE_MAX;

void take_tasks(Work& work) {
  for (;;) {
    const int64_t i = __atomic_fetch_add(&work.next, 1, __ATOMIC_RELAXED);
    if (i >= work.num_tasks) return;
    work.task(i, work.context);
  }
}

// Threads take the next task until none is left, so that uneven tasks keep all of them busy.
void drain(int64_t, int64_t, void* opaque) {
  Work& work = *static_cast<Work*>(opaque);
  std::jmp_buf here, *const outer = leave_task;
  if (setjmp(here) == 0) {
    leave_task = &here;
    take_tasks(work);
  } else {
    __atomic_store_n(&work.out_of_memory, true, __ATOMIC_RELAXED);
    __atomic_store_n(&work.next, work.num_tasks, __ATOMIC_RELAXED);
  }
  leave_task = outer;
}

struct ThreadScratch {
  void* data = nullptr;
  size_t size = 0;
  ~ThreadScratch() { std::free(data); }
};

thread_local ThreadScratch scratch_of_thread;

}  // namespace

Bf16Unit bf16_unit() { return unit_in_use; }

void run_tasks(int64_t num_tasks, void (*task)(int64_t, void*), void* context) {
  uint32_t num_threads = 1;
  if (num_threads_of_torch != nullptr) num_threads_of_torch(&num_threads);
  Work work{task, context, num_tasks, 0, false};
  const int64_t workers = num_tasks < num_threads ? num_tasks : num_threads;
  if (workers <= 1 || parallel_for_of_torch == nullptr) {
    drain(0, 1, &work);
  } else {
    parallel_for_of_torch(0, workers, 1, drain, &work);
  }
  if (work.out_of_memory) out_of_memory = true;
}

int end_of_kernel(int status) {
  const bool failed = out_of_memory;
  out_of_memory = false;
  return failed ? kOutOfMemory.value : status;
}

void* thread_scratch(size_t bytes) {
  ThreadScratch& scratch = scratch_of_thread;
  if (scratch.size < bytes || bytes > most_scratch) {
    std::free(scratch.data);
    scratch.size = (bytes + bytes / 4 + 4095) / 4096 * 4096;
    scratch.data = bytes > most_scratch ? nullptr : std::aligned_alloc(4096, scratch.size);
    if (scratch.data == nullptr) {
      scratch.size = 0;
      if (leave_task != nullptr) std::longjmp(*leave_task, 1);
      std::fprintf(stderr, "turbogr: scratch memory was taken outside of a task\n");
      std::abort();
    }
  }
  return scratch.data;
}

}  // namespace turbogr

#define TURBOGR_EXPORT extern "C" __attribute__((visibility("default")))

// Takes PyTorch's `torch_parallel_for` and `torch_get_num_threads`; with null pointers everything runs on one thread.
TURBOGR_EXPORT void turbogr_init(turbogr::ParallelFor parallel_for, turbogr::NumThreads num_threads) {
  turbogr::parallel_for_of_torch = num_threads != nullptr ? parallel_for : nullptr;
  turbogr::num_threads_of_torch = parallel_for != nullptr ? num_threads : nullptr;
}

// Makes kernels multiply bf16 by this unit from now on. The caller has found that it works, and that tiles are allowed
// (`turbogr_fma_flops` asks for them).
TURBOGR_EXPORT void turbogr_set_bf16_unit(int unit) { turbogr::unit_in_use = static_cast<turbogr::Bf16Unit>(unit); }

// No task gets more scratch than this; for tests of what happens without memory.
TURBOGR_EXPORT void turbogr_limit_scratch(size_t bytes) { turbogr::most_scratch = bytes; }

#if defined(__x86_64__)
// Whether the extensions are there that the AVX2 build uses besides AVX2. Every processor with AVX2 has them, but a
// virtual machine may hide them.
static bool has_avx2_companions() {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_F16C) || !(c & bit_POPCNT)) return false;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b & bit_BMI) || !(b & bit_BMI2)) return false;
  return __get_cpuid(0x80000001u, &a, &b, &c, &d) && (c & bit_LZCNT);
}
#endif

// Whether this processor can run the kernels with this suffix.
TURBOGR_EXPORT int turbogr_runs(const char* isa) {
  if (std::strcmp(isa, "generic") == 0) return 1;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_avx2_companions();
  if (std::strcmp(isa, "avx2") == 0) return avx2;
  if (std::strcmp(isa, "avx512") == 0) {
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  }
#endif
  return 0;
}
