// The machine behind cuda_emulation.h: threads as fibers on one CPU thread, in an order drawn from a seed. A
// block runs until a fence or an atomic lets another one of its grid run.
#include "cuda_emulation.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "machine.h"
#include "ptx.h"
#include "shadow.h"

// This file is never instrumented itself; EMULATION_ASAN says that the kernels are.
#if EMULATION_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#if defined(__x86_64__)
// Saves the callee-saved registers on the old stack, its pointer in *from, and continues with the new one.
extern "C" void emulation_switch(void** from, void* to) __attribute__((visibility("hidden")));
asm(R"(
.text
.hidden emulation_switch
.globl emulation_switch
.type emulation_switch, @function
emulation_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulation_switch, .-emulation_switch
)");
#else
#include <ucontext.h>
#endif

// The bounds of the section that holds the static shared variables; absent when there are none.
extern "C" {
extern char __start_emulated_shared[] __attribute__((weak, visibility("hidden")));
extern char __stop_emulated_shared[] __attribute__((weak, visibility("hidden")));
}

namespace emulation {

uint3 thread_index, block_index;
dim3 block_dim, grid_dim;

namespace {

#if EMULATION_ASAN
constexpr size_t kStackBytes = 256 << 10;
#else
constexpr size_t kStackBytes = 64 << 10;
#endif
constexpr size_t kMaxShared = 99 << 10;  // what a block may have on every device of sm_80 .. sm_120
constexpr size_t kTogether = 3;          // blocks of one grid that take turns
constexpr int kTurns = 3;                // times that others interrupt a block at fences, and at atomics
constexpr int kAhead = 2;                // launches that may start before the one that runs has ended
constexpr size_t kMaxStacks = 16 << 10;
constexpr size_t kGuard = 64;  // bytes after the dynamic shared memory that must stay as they are

struct Fiber {
  char* stack = nullptr;  // lowest address
  size_t bytes = 0;
#if defined(__x86_64__)
  void* pointer = nullptr;
#else
  ucontext_t context;
#endif
  void* fake_stack = nullptr;  // AddressSanitizer's
};

enum class State { kReady, kBarrier, kWarp, kDependency, kExited };
const char* const kStateNames[] = {"ready", "at __syncthreads", "in a warp operation", "at grid_dependency_wait",
                                   "exited"};

struct Copy {
  void* shared;
  const void* global;
  unsigned bytes, zeros;
  int group;
  bool read;       // already, or only at the wait
  char value[16];  // then
};

struct Thread {
  Fiber fiber;
  uint3 index;
  int number;
  State state;
  Barrier barrier_kind;
  int predicate;
  WarpOp op;
  unsigned mask;
  uint64_t value;
  int source;
  void (*run)(void* const*);
  uint64_t result;
  std::vector<Copy> copies;
  std::vector<char> memory;  // for who runs it
  int committed;
  bool waited;  // for the kernel ahead
  ThreadView view;
};

struct Launch {
  const void* address;
  dim3 grid, block;
  size_t shared;
  bool overlaps;
  std::function<void()> kernel;
  int number = 0;  // of those that run together
  int64_t num_blocks = 0;
  int64_t num_released = 0;  // blocks that have let the next launch start, or ended
  bool is_released = false;
};

// One block of threads with all that it holds.
struct Block {
  Launch* launch;
  int64_t number;
  uint3 index;
  bool dependency_resolved;
  bool released = false;
  int fence_turns, atomic_turns;  // that others may still take
  BlockView view;
  std::vector<Thread> threads;
  std::vector<int> ready;
  std::vector<unsigned> waiting;  // per warp: the lanes in a warp operation
  int live = 0, at_barrier = 0;
  unsigned char* shared = nullptr;
  int poison;
  std::vector<char> static_shared;  // kept while other blocks run, once it has begun
};

uint64_t random_state = 1;
int next_poison = 0;
std::vector<Launch> queue;
std::string error_text;
Fiber host;
Block* block = nullptr;
Thread* current = nullptr;
// Stacks, in one piece of memory, and those that can be used again.
char* all_stacks = nullptr;
size_t num_stacks = 0;
const size_t page_bytes = size_t(sysconf(_SC_PAGESIZE));
std::vector<char*> stacks;
Shadow shadow;
bool records = false, fences_ignored = false;
std::vector<Record> records_made;

uint64_t random_bits() {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state * 0x2545F4914F6CDD1D;
}

unsigned random_below(size_t n) { return unsigned(((random_bits() >> 32) * n) >> 32); }

// NaN, large and positive, large and negative: whatever a kernel does with it, one of them shows.
int poison() {
  static const int kBytes[] = {0xff, 0x7f, 0xfe};
  return kBytes[next_poison];
}

char* static_begin() { return __start_emulated_shared; }
size_t static_bytes() { return static_begin() ? size_t(__stop_emulated_shared - __start_emulated_shared) : 0; }

// Word loops, because AddressSanitizer would check memset and memcpy, and the section holds its red zones
// too.
typedef uint64_t Word __attribute__((may_alias, aligned(1)));
#define NO_MEMSET __attribute__((optimize("no-tree-loop-distribute-patterns")))
NO_MEMSET void fill_static(int byte) {
  char* p = static_begin();
  const size_t n = static_bytes();
  const uint64_t word = 0x0101010101010101 * uint64_t(byte);
  size_t i = 0;
  for (; i + 8 <= n; i += 8) *reinterpret_cast<Word*>(p + i) = word;
  for (; i < n; ++i) p[i] = char(byte);
}
NO_MEMSET void copy_bytes(char* to, const char* from, size_t n) {
  size_t i = 0;
  for (; i + 8 <= n; i += 8) *reinterpret_cast<Word*>(to + i) = *reinterpret_cast<const Word*>(from + i);
  for (; i < n; ++i) to[i] = from[i];
}

void switch_fiber(Fiber& from, Fiber& to, [[maybe_unused]] bool ends = false) {
#if EMULATION_ASAN
  __sanitizer_start_switch_fiber(ends ? nullptr : &from.fake_stack, to.stack, to.bytes);
#endif
#if defined(__x86_64__)
  emulation_switch(&from.pointer, to.pointer);
#else
  swapcontext(&from.context, &to.context);
#endif
#if EMULATION_ASAN
  __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

void resume(Thread& thread, Fiber& from, bool ends = false) {
  current = &thread;
  thread_index = thread.index;
  switch_fiber(from, thread.fiber, ends);
}

std::string describe(const Thread& t) {
  char text[160];
  snprintf(text, sizeof(text), "thread (%u, %u, %u) of block (%u, %u, %u)", t.index.x, t.index.y, t.index.z,
           block->index.x, block->index.y, block->index.z);
  return text;
}

// Says where threads are that can never continue.
[[noreturn]] void deadlock() {
  int counts[5] = {};
  const Thread* example[5] = {};
  for (const Thread& t : block->threads) {
    ++counts[int(t.state)];
    if (!example[int(t.state)]) example[int(t.state)] = &t;
  }
  std::string text = "deadlock:";
  for (int s = 0; s < 5; ++s)
    if (counts[s])
      text += " " + std::to_string(counts[s]) + " threads " + kStateNames[s] + " (" +
              std::to_string(example[s]->number) + " first)";
  fail("%s", text.c_str());
}

// Leaves the current thread, which is not ready, for another; comes back when it has been chosen again.
void leave(bool ends = false) {
  Fiber& from = current->fiber;
  std::vector<int>& ready = block->ready;
  if (ready.empty()) {
    bool suspended = block->live == 0;
    if (!suspended && !block->dependency_resolved)
      for (const Thread& t : block->threads) suspended |= t.state == State::kDependency;
    if (!suspended) deadlock();
    switch_fiber(from, host, ends);
    return;
  }
  const size_t chosen = random_below(ready.size());
  Thread& next = block->threads[ready[chosen]];
  ready[chosen] = ready.back();
  ready.pop_back();
  if (&next == current) return;
  resume(next, from, ends);
}

void make_ready(Thread& t) {
  t.state = State::kReady;
  block->ready.push_back(t.number);
}

// The current thread, which stays ready, lets the host choose who runs.
void give_way() {
  make_ready(*current);
  switch_fiber(current->fiber, host);
}

void release_barrier() {
#if !EMULATION_ASAN
  std::vector<ThreadView*> views;
  for (Thread& t : block->threads) views.push_back(&t.view);
  shadow.barrier(block->view, views);
#endif
  int count = 0;
  const Thread* first = nullptr;
  for (const Thread& t : block->threads) {
    if (t.state != State::kBarrier) continue;
    if (first && first->barrier_kind != t.barrier_kind) fail("threads meet at different kinds of __syncthreads");
    first = &t;
    count += t.predicate != 0;
  }
  for (Thread& t : block->threads) {
    if (t.state != State::kBarrier) continue;
    const int all = block->at_barrier;
    t.result = t.barrier_kind == Barrier::kCount ? count : t.barrier_kind == Barrier::kAnd ? count == all : count > 0;
    make_ready(t);
  }
  block->at_barrier = 0;
}

void thread_main() {
#if EMULATION_ASAN
  const void* bottom;
  size_t bytes;
  __sanitizer_finish_switch_fiber(nullptr, &bottom, &bytes);
  if (!host.stack) host.stack = static_cast<char*>(const_cast<void*>(bottom)), host.bytes = bytes;
#endif
  block->launch->kernel();
  if (block->launch->overlaps && !current->waited) fail("a thread ends before grid_dependency_wait()");
  current->state = State::kExited;
  --block->live;
  if (block->live > 0 && block->at_barrier == block->live) release_barrier();
  leave(true);
  abort();  // an exited thread never comes back
}

char* take_stack() {
  if (!stacks.empty()) {
    char* stack = stacks.back();
    stacks.pop_back();
    return stack;
  }
  if (!all_stacks) {
    void* memory = mmap(nullptr, kMaxStacks * (kStackBytes + page_bytes), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) abort();
    all_stacks = static_cast<char*>(memory);
  }
  if (num_stacks == kMaxStacks) abort();
  char* guard = all_stacks + num_stacks++ * (kStackBytes + page_bytes);
  if (mprotect(guard, page_bytes, PROT_NONE)) abort();
  return guard + page_bytes;
}

void start_fiber(Fiber& fiber) {
  fiber.stack = take_stack();
  fiber.bytes = kStackBytes;
#if defined(__x86_64__)
  void** top = reinterpret_cast<void**>(fiber.stack + fiber.bytes);
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(thread_main);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  fiber.pointer = top;
#else
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack;
  fiber.context.uc_stack.ss_size = fiber.bytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, thread_main, 0);
#endif
}

std::unique_ptr<Block> make_block(Launch& launch, int64_t number, bool dependency_resolved) {
  auto made = std::make_unique<Block>();
  made->launch = &launch;
  made->number = number;
  made->dependency_resolved = dependency_resolved;
  for (int* turns : {&made->fence_turns, &made->atomic_turns}) *turns = 1 + int(random_below(kTurns));
  const int64_t x = launch.grid.x, y = launch.grid.y;
  made->index = {unsigned(number % x), unsigned(number / x % y), unsigned(number / (x * y))};
  const int n = int(launch.block.x * launch.block.y * launch.block.z);
  made->threads.resize(n);
  made->waiting.assign((n + 31) / 32, 0);
  made->live = n;
  for (int i = 0; i < n; ++i) {
    Thread& t = made->threads[i];
    t.number = i;
    t.index = {i % launch.block.x, i / launch.block.x % launch.block.y, i / (launch.block.x * launch.block.y)};
    t.state = State::kReady;
    t.committed = 0;
    t.waited = false;
    start_fiber(t.fiber);
    made->ready.push_back(i);
  }
  // AddressSanitizer guards the exact end; without it the bytes after it are compared later.
  size_t bytes = launch.shared;
#if !EMULATION_ASAN
  bytes += kGuard;
#endif
  void* memory = nullptr;
  if (bytes && posix_memalign(&memory, 128, bytes)) abort();
  made->shared = static_cast<unsigned char*>(memory);
  made->poison = poison();
  if (memory) memset(memory, made->poison, bytes);
  return made;
}

// Runs until all threads have exited or wait for the dependency, or one gives way; false after an error.
bool run(Block& which) {
  block = &which;
  block_index = which.index;
  block_dim = which.launch->block;
  grid_dim = which.launch->grid;
  if (which.static_shared.empty())
    fill_static(which.poison);
  else
    copy_bytes(static_begin(), which.static_shared.data(), static_bytes());
  if (!which.ready.empty()) {
    const size_t chosen = random_below(which.ready.size());
    Thread& first = which.threads[which.ready[chosen]];
    which.ready[chosen] = which.ready.back();
    which.ready.pop_back();
    resume(first, host);
  }
  if (which.live > 0) {
    which.static_shared.resize(static_bytes());
    copy_bytes(which.static_shared.data(), static_begin(), static_bytes());
  }
  block = nullptr;
  current = nullptr;
  return error_text.empty();
}

void finish(std::unique_ptr<Block> done) {
#if !EMULATION_ASAN
  for (size_t i = 0; done->shared && i < kGuard; ++i)
    if (done->shared[done->launch->shared + i] != (unsigned char)done->poison && error_text.empty())
      error_text = "a thread wrote behind the dynamic shared memory";
#endif
  free(done->shared);
  for (Thread& t : done->threads) {
#if EMULATION_ASAN
    if (t.state != State::kExited) __asan_unpoison_memory_region(t.fiber.stack, t.fiber.bytes);
#endif
    stacks.push_back(t.fiber.stack);
  }
}

}  // namespace

void fail(const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  error_text = std::string(text) + (current ? ", " + describe(*current) : "");
  switch_fiber(current->fiber, host, true);
  abort();
}

cudaError_t enqueue(const void* address, dim3 grid, dim3 threads, size_t shared, bool overlaps,
                    std::function<void()> kernel, Parameters parameters) {
  if (const auto program = ptx::find(address)) {
    shared += program->static_shared;
    kernel = [=] { ptx::run(*program, parameters); };
  }
  const uint64_t per_block = uint64_t(threads.x) * threads.y * threads.z;
  if (!grid.x || !grid.y || !grid.z || grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535 || !per_block ||
      per_block > 1024 || threads.z > 64 || shared > kMaxShared)
    return cudaErrorInvalidConfiguration;
  if (records)
    records_made.push_back({address, {grid.x, grid.y, grid.z}, unsigned(per_block), shared, overlaps});
  else
    queue.push_back({address, grid, threads, shared, overlaps, std::move(kernel)});
  return cudaSuccess;
}

void record(bool on) { records = on; }

std::vector<Record> recorded() { return std::move(records_made); }

bool watched() { return !EMULATION_ASAN; }

void ignore_fences(bool ignored) { fences_ignored = ignored; }

bool sanitized() { return EMULATION_ASAN; }

void seed(uint64_t value) {
  random_state = value * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019;
  if (!random_state) random_state = 1;
}

// Launches that run together, in their order, and the blocks that have begun ahead of their time.
class Batch {
 public:
  explicit Batch(std::vector<Launch> launches) : launches_(std::move(launches)), early_(launches_.size()) {
    for (size_t i = 0; i < launches_.size(); ++i) {
      launches_[i].number = int(i);
      launches_[i].num_blocks = int64_t(launches_[i].grid.x) * launches_[i].grid.y * launches_[i].grid.z;
    }
  }

  ~Batch() {
    for (auto& left : early_)
      if (left) finish(std::move(left));
    for (auto& left : begun_) finish(std::move(left));
  }

  void run_all() {
    for (size_t i = 0; i < launches_.size() && error_text.empty(); ++i) run_launch(i);
  }

 private:
  // Starts one block of each launch that may overlap the one that runs: it stops at its wait.
  void start_early(size_t running) {
    for (size_t i = running; i < running + kAhead && i + 1 < launches_.size(); ++i) {
      Launch& next = launches_[i + 1];
      if (!launches_[i].is_released || !next.overlaps) return;
      if (early_[i + 1]) continue;
      next_poison = int(random_below(3));
      shadow.start(int(i + 1));
      early_[i + 1] = make_block(next, random_below(size_t(next.num_blocks)), false);
      do {
        if (!run(*early_[i + 1])) return;
      } while (!early_[i + 1]->ready.empty());
    }
  }

  void run_launch(size_t i) {
    Launch& launch = launches_[i];
    shadow.begin(int(i));
    next_poison = int(random_below(3));
    std::vector<int64_t> order(launch.num_blocks);
    for (int64_t b = 0; b < launch.num_blocks; ++b) order[b] = b;
    for (int64_t b = launch.num_blocks - 1; b > 0; --b) std::swap(order[b], order[random_below(size_t(b) + 1)]);
    if (early_[i]) {
      std::unique_ptr<Block> first = std::move(early_[i]);
      order.erase(std::find(order.begin(), order.end(), first->number));
      first->dependency_resolved = true;
      block = first.get();
      for (Thread& t : first->threads)
        if (t.state == State::kDependency) make_ready(t);
      begun_.push_back(std::move(first));
    }
    start_early(i);
    while (error_text.empty() && (!order.empty() || !begun_.empty())) {
      const bool may_begin = !order.empty() && begun_.size() < kTogether;
      const size_t chosen = random_below(begun_.size() + may_begin);
      if (chosen == begun_.size()) {
        begun_.push_back(make_block(launch, order.back(), true));
        order.pop_back();
      }
      if (!run(*begun_[chosen])) return;
      if (begun_[chosen]->live == 0) {
        if (!begun_[chosen]->released) ++launch.num_released;
        finish(std::move(begun_[chosen]));
        begun_.erase(begun_.begin() + long(chosen));
      }
      start_early(i);
    }
  }

  std::vector<Launch> launches_;
  std::vector<std::unique_ptr<Block>> early_;  // of each launch
  std::vector<std::unique_ptr<Block>> begun_;  // of the one that runs
};

std::string synchronize() {
  error_text.clear();
  shadow.reset();
  {
    Batch batch(std::move(queue));
    queue.clear();
    batch.run_all();
  }
  host.stack = nullptr;
  return error_text;
}

int barrier(Barrier kind, int predicate) {
  current->state = State::kBarrier;
  current->barrier_kind = kind;
  current->predicate = predicate;
  if (++block->at_barrier == block->live) release_barrier();
  leave();
  return int(current->result);
}

unsigned lane() { return unsigned(current->number) % 32; }

static uint64_t arrive(WarpOp op, unsigned mask, uint64_t value, int source, void (*run)(void* const*)) {
  Thread& me = *current;
  const int first = me.number / 32 * 32, size = std::min(int(block->threads.size()) - first, 32);
  unsigned& waiting = block->waiting[first / 32];
  if (!(mask >> lane() & 1)) fail("the mask %08x of a warp operation leaves out the lane that calls it", mask);
  me.state = State::kWarp;
  me.op = op;
  me.mask = mask;
  me.value = value;
  me.source = source;
  me.run = run;
  waiting |= 1u << lane();
  Thread* lanes = &block->threads[first];
  const unsigned expected = size == 32 ? mask : mask & ((1u << size) - 1);
  if ((waiting & expected) != expected) {
    for (int l = 0; l < size; ++l)
      if ((mask >> l & 1) && lanes[l].state == State::kExited)
        fail("the mask %08x of a warp operation names lane %d, which has exited", mask, l);
    leave();
    return current->result;
  }
  void* payloads[32] = {};
  unsigned votes = 0;
  uint64_t all = 0;
  bool begun = false;
  for (int l = 0; l < size; ++l) {
    if (!(mask >> l & 1)) continue;
    const Thread& t = lanes[l];
    if (t.op != op || t.mask != mask || t.run != run)
      fail("lanes %u and %d of a warp meet in different warp operations (masks %08x and %08x)", lane(), l, mask,
           t.mask);
    payloads[l] = reinterpret_cast<void*>(t.value);
    votes |= unsigned(t.value != 0) << l;
    const int64_t a = int64_t(all), b = int64_t(t.value);  // sign-extended where signed
    const uint64_t ua = uint32_t(all), ub = uint32_t(t.value);
    if (!begun)
      all = t.value;
    else if (op == WarpOp::kAdd)
      all = uint32_t(ua + ub);
    else if (op == WarpOp::kMin)
      all = source ? uint64_t(std::min(a, b)) : std::min(ua, ub);
    else if (op == WarpOp::kMax)
      all = source ? uint64_t(std::max(a, b)) : std::max(ua, ub);
    else if (op == WarpOp::kAnd)
      all = ua & ub;
    else if (op == WarpOp::kOr)
      all = ua | ub;
    else if (op == WarpOp::kXor)
      all = ua ^ ub;
    begun = true;
  }
  if (op == WarpOp::kCollective) run(payloads);
  for (int l = 0; l < size; ++l) {
    if (!(mask >> l & 1)) continue;
    Thread& t = lanes[l];
    switch (op) {
      case WarpOp::kShuffle: {
        const bool there = t.source < size && (mask >> t.source & 1);
        t.result = there ? lanes[t.source].value : 0x0101010101010101 * uint64_t(poison());
        break;
      }
      case WarpOp::kBallot:
        t.result = votes;
        break;
      case WarpOp::kAny:
        t.result = votes != 0;
        break;
      case WarpOp::kAll:
        t.result = votes == expected;
        break;
      case WarpOp::kMatch:
        t.result = 0;
        for (int o = 0; o < size; ++o)
          if ((mask >> o & 1) && lanes[o].value == t.value) t.result |= 1u << o;
        break;
      default:
        t.result = all;
    }
  }
  waiting &= ~expected;
  for (int l = 0; l < size; ++l)
    if (mask >> l & 1) make_ready(lanes[l]);
  leave();
  return current->result;
}

uint64_t warp(WarpOp op, unsigned mask, uint64_t value, int source) { return arrive(op, mask, value, source, nullptr); }

void warp_collective(void (*run)(void* const*), void* payload) {
  const int first = current->number / 32 * 32;
  if (int(block->threads.size()) - first < 32)
    fail("an instruction of a whole warp in a warp of %d threads", int(block->threads.size()) - first);
  arrive(WarpOp::kCollective, 0xffffffffu, reinterpret_cast<uint64_t>(payload), 0, run);
}

unsigned char* dynamic_shared() { return block->shared; }

void expect_aligned(const void* address, size_t bytes, const char* what) {
  if (reinterpret_cast<uintptr_t>(address) % bytes)
    fail("%s: the address %p is not aligned to %zu bytes", what, address, bytes);
}

void expect_shared(const void* address, size_t bytes, const char* what) {
  const char* p = static_cast<const char*>(address);
  const char* dynamic = reinterpret_cast<const char*>(block->shared);
  if (dynamic && p >= dynamic && p + bytes <= dynamic + block->launch->shared) return;
  if (static_begin() && p >= static_begin() && p + bytes <= static_begin() + static_bytes()) return;
  fail("%s: %p is not in shared memory", what, address);
}

// Whether an address belongs to the thread or the block rather than to the GPU's memory.
static bool is_private(const char* p) {
  if (p >= all_stacks && p < all_stacks + num_stacks * (kStackBytes + page_bytes)) return true;
  if (block->shared && p >= (char*)block->shared && p < (char*)block->shared + block->launch->shared + kGuard)
    return true;
  return p >= static_begin() && p < static_begin() + static_bytes();
}

#if !EMULATION_ASAN
void touch(const void* address, size_t bytes, bool stores) {
  if (!block || !current) return;  // a launcher
  const char* p = static_cast<const char*>(address);
  if (is_private(p)) return;
  const int launch = block->launch->number;
  std::string wrong;
  if (block->launch->overlaps && !current->waited)
    wrong = stores ? "stores before grid_dependency_wait()" : shadow.load_before_wait(p, bytes, launch);
  else if (stores)
    wrong = shadow.store(p, bytes, launch, block->number, current->number);
  else
    wrong = shadow.load(p, bytes, launch, block->number, block->view, current->view);
  if (!wrong.empty()) fail("a thread %s", wrong.c_str());
}
#else
void touch(const void*, size_t, bool) {}
#endif

char* thread_memory(size_t bytes) {
  current->memory.resize(bytes);
  return current->memory.data();
}

void copy_async(void* shared, const void* global, unsigned bytes, unsigned zeros) {
  expect_aligned(shared, bytes + zeros, "cp.async, destination");
  expect_aligned(global, bytes + zeros, "cp.async, source");
  expect_shared(shared, bytes + zeros, "cp.async, destination");
#if !EMULATION_ASAN
  touch(global, bytes, false);
#endif
  // The source is read at any time from here to the wait: at the one or at the other.
  Copy copy{shared, global, bytes, zeros, current->committed, random_below(2) == 1, {}};
  memcpy(copy.value, global, bytes);        // AddressSanitizer sees a bad address here, not at the wait
  memset(shared, poison(), bytes + zeros);  // from here to the wait it holds anything
  current->copies.push_back(copy);
}

void commit_async() { ++current->committed; }

void wait_async(int groups_left) {
  std::vector<Copy>& copies = current->copies;
  size_t kept = 0;
  for (const Copy& copy : copies) {
    if (groups_left >= 0 && copy.group >= current->committed - groups_left) {
      copies[kept++] = copy;
      continue;
    }
    memcpy(copy.shared, copy.read ? copy.value : copy.global, copy.bytes);
    memset(static_cast<char*>(copy.shared) + copy.bytes, 0, copy.zeros);
  }
  copies.resize(kept);
}

void dependency_wait() {
  if (!block->dependency_resolved) {
    current->state = State::kDependency;
    leave();
  }
  current->waited = true;
}

void launch_dependents() {
  if (block->released) return;
  block->released = true;
  Launch& launch = *block->launch;
  ++launch.num_released;
  if (launch.is_released) return;
  // Blocks of a grid are alike: where one does so before it waits, all do, whatever else they wait for.
  const bool early = launch.overlaps ? !current->waited : true;
  if (!early && launch.num_released < launch.num_blocks) return;
  launch.is_released = true;
  if (early && launch.overlaps) shadow.released_early(launch.number);
  give_way();
}

static void take_turns(int& left) {
  if (left == 0 || random_below(4) == 0) return;
  --left;
  give_way();
}

void fence() {
  take_turns(block->fence_turns);
#if !EMULATION_ASAN
  if (!fences_ignored) shadow.fence(block->view, current->view);
#endif
}

void before_atomic(const void* address) {
  if (is_private(static_cast<const char*>(address))) return;
  if (block->launch->overlaps && !current->waited) fail("an atomic before grid_dependency_wait()");
  take_turns(block->atomic_turns);
#if !EMULATION_ASAN
  shadow.atomic(address, block->number, block->view, current->number, current->view);
#endif
}

void after_atomic(const void* address, [[maybe_unused]] size_t bytes) {
  if (is_private(static_cast<const char*>(address))) return;
#if !EMULATION_ASAN
  touch(address, bytes, true);
#endif
  take_turns(block->atomic_turns);
}

}  // namespace emulation

// ---- what -fsanitize=thread calls at every access; ThreadSanitizer itself is not linked

#if !EMULATION_ASAN
extern "C" {
#define HOOK __attribute__((visibility("hidden"))) void
#define ACCESS(bytes)                                                               \
  HOOK __tsan_read##bytes(void* p) { emulation::touch(p, bytes, false); }           \
  HOOK __tsan_write##bytes(void* p) { emulation::touch(p, bytes, true); }           \
  HOOK __tsan_unaligned_read##bytes(void* p) { emulation::touch(p, bytes, false); } \
  HOOK __tsan_unaligned_write##bytes(void* p) { emulation::touch(p, bytes, true); }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
HOOK __tsan_read_range(void* p, size_t bytes) { emulation::touch(p, bytes, false); }
HOOK __tsan_write_range(void* p, size_t bytes) { emulation::touch(p, bytes, true); }
HOOK __tsan_vptr_update(void**, void*) {}
HOOK __tsan_func_entry(void*) {}
HOOK __tsan_func_exit() {}
HOOK __tsan_init() {}
}
#endif

// ---- the little of the CUDA runtime, and of probe.cu, that launchers call

namespace dflash {
bool has_context(int) { return true; }
}  // namespace dflash

extern "C" {
#define EMULATED __attribute__((visibility("hidden")))
EMULATED cudaError_t CUDARTAPI cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
EMULATED cudaError_t CUDARTAPI cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidDevice; }
EMULATED cudaError_t CUDARTAPI cudaGetLastError(void) { return cudaSuccess; }
EMULATED const char* CUDARTAPI cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorInvalidConfiguration ? "invalid configuration argument" : "emulated CUDA error";
}
EMULATED cudaError_t CUDARTAPI cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = 7;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = int(emulation::kMaxShared);
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      return cudaSuccess;
    default:
      return cudaErrorInvalidValue;
  }
}
}
