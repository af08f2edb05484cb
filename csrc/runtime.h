// What all kernels share: threads, scratch memory, and the names of exported functions.
//
// Each kernel source is compiled once per instruction set into a namespace and exported with the set's name as a
// suffix (`hstu_forward_avx2`); the Python side picks the suffix. Everything a kernel uses is either in that namespace
// or in runtime.cpp, which is compiled once for the baseline, so the linker cannot put code for a wide set into a
// narrow one. For the same reason kernels use no templates of the standard library.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#ifndef TURBOGR_ISA
#define TURBOGR_ISA generic
#endif

#define TURBOGR_PASTE2(a, b) a##_##b
#define TURBOGR_PASTE(a, b) TURBOGR_PASTE2(a, b)

// Defines an exported kernel; it returns kOk or kOutOfMemory.
#define TURBOGR_KERNEL(name) extern "C" __attribute__((visibility("default"))) int TURBOGR_PASTE(name, TURBOGR_ISA)

// Marks the parts of a kernel that a profile should show by name.
#define TURBOGR_OUTLINE __attribute__((noinline))
// For what must share the registers of its caller.
#define TURBOGR_INLINE inline __attribute__((always_inline))

namespace turbogr {

// Returns `status`, or that of kOutOfMemory if a task of this thread's kernel found no memory for its scratch.
int end_of_kernel(int status);

// What a kernel returns. One that comes to its end with kOk has failed all the same if tasks found no memory.
struct Status {
  int value;
  operator int() const { return end_of_kernel(value); }
};

constexpr Status kOk{0};
constexpr Status kOutOfMemory{1};

// Calls task(i, context) once for every i in [0, num_tasks), on the threads of PyTorch's pool, in any order. If a task
// finds no memory for its scratch, it and all later ones are left out, and the kernel returns kOutOfMemory in the end.
// Until then it goes on with what is in its outputs; so no task with scratch may compute indices for later stages.
void run_tasks(int64_t num_tasks, void (*task)(int64_t, void*), void* context);

// What multiplies bf16 (bf16_tiles.h); the numbers are those of `turbogr_set_bf16_unit`.
enum class Bf16Unit : int { none = 0, avx512_bf16 = 1, amx = 2 };

// The unit that the Python side has chosen; none at first.
Bf16Unit bf16_unit();

// Memory of the calling thread, 64-byte aligned, valid until its next call; it grows and is kept. For tasks alone:
// without memory it ends the task, by a jump over its frames, in which nothing may need a destructor.
void* thread_scratch(size_t bytes);

namespace TURBOGR_ISA {

using std::size_t;

inline int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

template <class Body>
void parallel_tasks(int64_t num_tasks, Body&& body) {
  run_tasks(num_tasks, [](int64_t i, void* context) { (*static_cast<Body*>(context))(i); }, &body);
}

// Calls body(begin, end) over [0, n) in blocks whose borders do not depend on the number of threads.
template <class Body>
void parallel_blocks(int64_t n, int64_t block, Body&& body) {
  parallel_tasks(ceil_div(n, block), [&](int64_t i) { body(i * block, min_of(n, (i + 1) * block)); });
}

// Rows per block such that a block touches about 64 KB.
inline int64_t rows_per_block(int64_t bytes_per_row) { return max_of(1, 65536 / max_of(1, bytes_per_row)); }

// An array that is freed at the end of its scope. Test it before use: it is false if memory ran out.
template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t count)
      : data_(static_cast<T*>(
            std::aligned_alloc(64, static_cast<size_t>(round_up(max_of(count, 1) * int64_t(sizeof(T)), 64))))) {}
  ~Buffer() { std::free(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  explicit operator bool() const { return data_ != nullptr; }
  T* data() { return data_; }
  T& operator[](int64_t i) { return data_[i]; }
  const T& operator[](int64_t i) const { return data_[i]; }

 private:
  T* data_;
};

// Hands out consecutive 64-byte aligned pieces of one block of memory; with a null base it only adds up.
class Arena {
 public:
  explicit Arena(void* base = nullptr) : base_(static_cast<char*>(base)) {}
  template <class T>
  T* take(int64_t count) {
    char* at = base_ + used_;
    used_ += static_cast<size_t>(round_up(count * int64_t(sizeof(T)), 64));
    return base_ ? reinterpret_cast<T*>(at) : nullptr;
  }
  size_t used() const { return used_; }

 private:
  char* base_;
  size_t used_ = 0;
};

// Lays out a struct of scratch pointers (`layout(arena)`) in the calling thread's memory.
template <class Scratch, class... Shape>
Scratch take_scratch(const Shape&... shape) {
  Arena measure;
  Scratch{}.layout(measure, shape...);
  Arena arena(thread_scratch(measure.used()));
  Scratch scratch{};
  scratch.layout(arena, shape...);
  return scratch;
}

}  // namespace TURBOGR_ISA
}  // namespace turbogr
