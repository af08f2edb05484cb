// Loops of fused multiply-adds that touch no memory: what the processor computes at most, the 100 % of MFU.
//
// Compiled once, for the baseline: each loop names its own instruction set, because those for bf16 exist in no other
// kernel. A processor may announce an instruction that its virtual machine forbids, so the Python side runs the loops
// for bf16 in a child process first.

#include "runtime.h"

#if defined(__x86_64__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#define TURBOGR_HAS_BF16_LOOPS 1
#else
#define TURBOGR_HAS_BF16_LOOPS 0
#endif

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif
#if TURBOGR_HAS_BF16_LOOPS && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

// A value that the compiler must compute, and knows nothing of.
template <class T>
inline void keep(T& x) {
#if defined(__x86_64__)
  asm volatile("" : "+x"(x));
#elif defined(__aarch64__)
  asm volatile("" : "+w"(x));
#else
  asm volatile("" : "+m"(x));
#endif
}

// Independent sums, enough to hide the latency of an addition on every port, and few enough to stay in registers.
constexpr int kFewSums = 12, kManySums = 24;

typedef float Four __attribute__((vector_size(16)));

// No fused multiply-add on the x86 baseline: there it is a multiplication and an addition.
void loop_generic(int64_t rounds) {
  Four sums[kFewSums] = {}, left = Four{} + 0.5f, right = Four{} + 0.25f;
  keep(left);
  keep(right);
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < kFewSums; ++j) sums[j] = sums[j] * left + right;
  }
  for (Four& sum : sums) keep(sum);
}

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) void loop_avx2(int64_t rounds) {
  __m256 sums[kFewSums], left = _mm256_set1_ps(0.5f), right = _mm256_set1_ps(0.25f);
  asm volatile("" : "+x"(left), "+x"(right));
  for (__m256& sum : sums) sum = right;
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < kFewSums; ++j) sums[j] = _mm256_fmadd_ps(sums[j], left, right);
  }
  for (__m256& sum : sums) asm volatile("" : "+x"(sum));
}

__attribute__((target("avx512f"))) void loop_avx512(int64_t rounds) {
  __m512 sums[kManySums], left = _mm512_set1_ps(0.5f), right = _mm512_set1_ps(0.25f);
  asm volatile("" : "+v"(left), "+v"(right));
  for (__m512& sum : sums) sum = right;
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 24
    for (int j = 0; j < kManySums; ++j) sums[j] = _mm512_fmadd_ps(sums[j], left, right);
  }
  for (__m512& sum : sums) asm volatile("" : "+v"(sum));
}
#endif

#if TURBOGR_HAS_BF16_LOOPS
__attribute__((target("avx512f,avx512bf16"))) void loop_avx512_bf16(int64_t rounds) {
  const __m512i ones = _mm512_set1_epi32(0x3f003f00);  // 0.5 twice
  __m512bh left, right;
  std::memcpy(&left, &ones, sizeof left);
  std::memcpy(&right, &ones, sizeof right);
  __m512 sums[kManySums];
  for (__m512& sum : sums) sum = _mm512_setzero_ps();
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 24
    for (int j = 0; j < kManySums; ++j) sums[j] = _mm512_dpbf16_ps(sums[j], left, right);
  }
  for (__m512& sum : sums) asm volatile("" : "+v"(sum));
}

struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {};
  uint8_t rows[16] = {};
};

__attribute__((target("amx-tile,amx-bf16"))) void loop_amx_bf16(int64_t rounds) {
  TileShapes shapes;
  for (int tile = 0; tile < 8; ++tile) {
    shapes.bytes_per_row[tile] = 64;
    shapes.rows[tile] = 16;
  }
  asm volatile("" : : "r"(&shapes) : "memory");
  _tile_loadconfig(&shapes);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  _tile_zero(6);
  _tile_zero(7);
  for (int64_t i = 0; i < rounds; ++i) {
    _tile_dpbf16ps(0, 6, 7);
    _tile_dpbf16ps(1, 6, 7);
    _tile_dpbf16ps(2, 6, 7);
    _tile_dpbf16ps(3, 6, 7);
    _tile_dpbf16ps(4, 6, 7);
    _tile_dpbf16ps(5, 6, 7);
  }
  _tile_release();
}

bool may_use_tiles() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

bool has_tiles() {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 24 & 1) && (d >> 22 & 1);
}

bool has_avx512_bf16() {
  unsigned a, b, c, d;
  return __builtin_cpu_supports("avx512f") && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);
}
#endif

struct Loop {
  const char* name;
  void (*run)(int64_t);
  int64_t flops;  // of a round
};

const Loop kLoops[] = {
    {"generic", loop_generic, kFewSums * 4 * 2},
#if defined(__x86_64__)
    {"avx2", loop_avx2, kFewSums * 8 * 2},
    {"avx512", loop_avx512, kManySums * 16 * 2},
#endif
#if TURBOGR_HAS_BF16_LOOPS
    {"avx512_bf16", loop_avx512_bf16, kManySums * 32 * 2},
    {"amx_bf16", loop_amx_bf16, 6 * 16 * 16 * 32 * 2},
#endif
};

bool processor_has(const char* name) {
  if (std::strcmp(name, "generic") == 0) return true;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (std::strcmp(name, "avx2") == 0) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (std::strcmp(name, "avx512") == 0) return __builtin_cpu_supports("avx512f");
#endif
#if TURBOGR_HAS_BF16_LOOPS
  if (std::strcmp(name, "avx512_bf16") == 0) return has_avx512_bf16();
  if (std::strcmp(name, "amx_bf16") == 0) return has_tiles() && may_use_tiles();
#endif
  return false;
}

const Loop* find_loop(const char* name) {
  for (const Loop& loop : kLoops) {
    if (std::strcmp(loop.name, name) == 0 && processor_has(name)) return &loop;
  }
  return nullptr;
}

}  // namespace

#define TURBOGR_EXPORT extern "C" __attribute__((visibility("default")))

// Floating-point operations of a round of a loop; 0 if this processor or this build has no such loop.
TURBOGR_EXPORT int64_t turbogr_fma_flops(const char* name) {
  const Loop* const loop = find_loop(name);
  return loop == nullptr ? 0 : loop->flops;
}

// Runs a loop for `rounds` rounds `num_tasks` times, on the threads of PyTorch's pool. turbogr_fma_flops must know it.
TURBOGR_EXPORT void turbogr_fma_run(const char* name, int64_t rounds, int64_t num_tasks) {
  struct Context {
    void (*run)(int64_t);
    int64_t rounds;
  } context{find_loop(name)->run, rounds};
  turbogr::run_tasks(
      num_tasks,
      [](int64_t, void* opaque) {
        const Context& work = *static_cast<const Context*>(opaque);
        work.run(work.rounds);
      },
      &context);
}
