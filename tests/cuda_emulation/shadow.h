// Who stored each byte of global memory, and which threads may read it: a store reaches another block of its
// grid through a fence, an atomic and a fence, and the next kernel after that one's wait. Programs that read
// earlier may be lucky on a CPU and in most runs of a GPU.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

namespace emulation {

// Counts the events that order stores: fences, atomics, barriers, launches.
using Time = uint64_t;

// By block, for each of its threads: the time up to which its stores are visible.
using Knowledge = std::map<int64_t, std::vector<Time>>;

struct ThreadView {
  Time fenced = 0;               // its own stores up to then are fenced
  Time covered = 0;              // and those of the whole block up to then, by a barrier ahead of its fence
  Knowledge observed, acquired;  // from atomics; and after a fence
};

struct BlockView {
  std::vector<Time> fenced;  // of each thread, as of the last barrier
  Time covered = 0, barrier = 0;
  Knowledge observed, acquired;
};

class Shadow {
 public:
  // Forgets everything, before the first of several launches.
  void reset();
  // The first block of launch number `launch` starts, maybe while the kernel ahead runs; the whole kernel
  // begins; it lets the next one start before its own wait.
  void start(int launch);
  void begin(int launch);
  void released_early(int launch);

  void fence(BlockView& block, ThreadView& thread);
  void barrier(BlockView& block, const std::vector<ThreadView*>& threads);
  void atomic(const void* address, int64_t number, BlockView& block, int index, ThreadView& thread);

  // These return what is wrong with an access, empty if nothing is.
  std::string store(const char* address, size_t bytes, int launch, int64_t number, int thread);
  std::string load(const char* address, size_t bytes, int launch, int64_t number, const BlockView& block,
                   const ThreadView& view);
  std::string load_before_wait(const char* address, size_t bytes, int launch);

 private:
  struct Store {
    uint32_t time, launch : 12, thread : 10;
    uint32_t block;
  };
  struct Byte {
    Store store;
    uint32_t early;  // 1 + the last launch that has read it before its wait
  };
  static constexpr size_t kPage = 4096;
  using Page = std::vector<Byte>;

  Page* find(uintptr_t page);
  Page& make(uintptr_t page);
  Byte* find_byte(const char* address);

  Time now_ = 1;
  std::vector<Time> begun_,
      oldest_;  // by launch: its begin, and that of the oldest that its early part may meet
  std::vector<bool> released_early_;
  std::map<const void*, Knowledge> published_;
  std::unordered_map<uintptr_t, Page> pages_;
  uintptr_t last_page_ = 0;
  Page* last_ = nullptr;
};

}  // namespace emulation
