#include "cpu/base/team.h"

#ifdef _OPENMP
#include <omp.h>
#else
#include <functional>
#include <thread>
#include <vector>
#endif
#include <time.h>

#include <condition_variable>
#include <mutex>

namespace dflash {

namespace {

constexpr int kMaxRanges = 64;

// get and set are sequentially consistent, which Gate relies on. put is relaxed.
template <typename T>
T get(const T& from) {
  return __atomic_load_n(&from, __ATOMIC_SEQ_CST);
}
template <typename T>
void set(T& to, T value) {
  __atomic_store_n(&to, value, __ATOMIC_SEQ_CST);
}
template <typename T>
void put(T& to, T value) {
  __atomic_store_n(&to, value, __ATOMIC_RELAXED);
}

int64_t nanoseconds() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * int64_t(1000000000) + now.tv_nsec;
}

// Where threads wait for another thread's write. They spin for a while, then sleep to free the processor for the other
// thread.
class Gate {
 public:
  // Waits until there() is true.
  template <typename F>
  void wait(const F& there) {
    int64_t since = 0;
    for (int looks = 0;; ++looks) {
      if (there()) return;
      if (looks % 64 == 0) {
        const int64_t now = nanoseconds();
        if (since == 0) since = now;
        if (now - since > kPatience) break;
      }
#if defined(__x86_64__) || defined(__i386__)
      __builtin_ia32_pause();
#elif defined(__aarch64__)
      asm volatile("yield");
#endif
    }
    std::unique_lock<std::mutex> lock(mutex_);
    __atomic_fetch_add(&asleep_, 1, __ATOMIC_SEQ_CST);
    changed_.wait(lock, there);
    __atomic_fetch_sub(&asleep_, 1, __ATOMIC_SEQ_CST);
  }

  // Must be called after each write that makes there() true.
  void open() {
    if (get(asleep_) == 0) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    changed_.notify_all();
  }

 private:
  static constexpr int64_t kPatience = 200000;  // nanoseconds

  std::mutex mutex_;
  std::condition_variable changed_;
  int asleep_ = 0;
};

thread_local bool in_loop = false;  // true while this thread runs iterations; nested loops then run on it

struct Loop {
  void (*body)(const void*, int64_t, int64_t);
  const void* context;
  int64_t n;
};

class Team {
 public:
  explicit Team(int threads) : ranges_(threads < kMaxRanges ? threads : kMaxRanges) {
    for (int i = 0; i < ranges_; ++i) ranges_taken_[i].value = 0;
  }

  // Called on the thread that opened the team.
  void run(const Loop& loop) {
    const uint64_t round = ++last_round_;
    Loop& slot = loops_[round % 2].loop;
    __atomic_thread_fence(__ATOMIC_RELEASE);  // whoever reads these writes also sees the previous round
    put(slot.body, loop.body), put(slot.context, loop.context), put(slot.n, loop.n);
    set(round_, round);
    start_.open();
    all_ += loop.n;
    work(0, loop, round);
    end_.wait([&] { return get(ended_) == all_; });
  }

  // Called on every other thread; returns after close().
  void help(int thread) {
    for (uint64_t seen = 0, round = 0;; seen = round) {
      start_.wait([&] { return (round = get(round_)) != seen; });
      if (round == kClosed) break;
      const Loop& slot = loops_[round % 2].loop;
      const Loop loop{get(slot.body), get(slot.context), get(slot.n)};
      if (get(round_) == round) work(thread, loop, round);  // else a later round may be half written here
    }
    __atomic_fetch_add(&gone_, 1, __ATOMIC_SEQ_CST);
    end_.open();
  }

  // Dismisses the helpers and waits for them. OpenMP would wait too, but it spins for much longer before it sleeps.
  void close(int helpers) {
    set(round_, kClosed);
    start_.open();
    end_.wait([&] { return get(gone_) == helpers; });
  }

 private:
  static constexpr uint64_t kClosed = ~uint64_t(0);

  // Progress in a range: round << 32 | iterations taken. An older round means none. One cache line each.
  struct alignas(64) Taken {
    uint64_t value;
  };

  // Takes half of the iterations left in a range of `count`, as [first, last); returns false if none are left. A round
  // cannot end before all its iterations are taken, so a successful take belongs to the current round even if this
  // thread read the loop long ago.
  static bool take(Taken& range, uint64_t round, int64_t count, int64_t& first, int64_t& last) {
    uint64_t taken = get(range.value);
    for (;;) {
      if (taken >> 32 > round) return false;
      first = taken >> 32 == round ? int64_t(taken & 0xffffffffu) : 0;
      if (first >= count) return false;
      last = first + (count - first + 1) / 2;
      if (__atomic_compare_exchange_n(&range.value, &taken, round << 32 | uint64_t(last), true, __ATOMIC_SEQ_CST,
                                      __ATOMIC_SEQ_CST))
        return true;
    }
  }

  void work(int thread, const Loop& loop, uint64_t round) {
    int64_t ended = 0;
    for (int i = 0; i < ranges_; ++i) {
      const int range = (thread + i) % ranges_;
      // The first ranges are the longer ones, because their threads arrive first.
      const int64_t begin = (loop.n * range + ranges_ - 1) / ranges_,
                    count = (loop.n * (range + 1) + ranges_ - 1) / ranges_ - begin;
      int64_t first, last;
      while (take(ranges_taken_[range], round, count, first, last)) {
        in_loop = true;
        loop.body(loop.context, begin + first, begin + last);
        in_loop = false;
        ended += last - first;
      }
    }
    if (!ended) return;
    __atomic_fetch_add(&ended_, ended, __ATOMIC_SEQ_CST);
    if (thread) end_.open();
  }

  // Fields that different threads write are in different cache lines.
  struct alignas(64) Slot {
    Loop loop;
  };

  Slot loops_[2] = {};              // of this round and the previous one
  alignas(64) uint64_t round_ = 0;  // number of the current loop, from 1
  Gate start_;
  alignas(64) int64_t ended_ = 0;  // iterations finished in all rounds
  int gone_ = 0;                   // helpers
  Gate end_;
  alignas(64) uint64_t last_round_ = 0;
  int64_t all_ = 0;  // iterations in all rounds started
  const int ranges_;
  Taken ranges_taken_[kMaxRanges];
};

thread_local Team* team = nullptr;  // the team that this thread opened

// body(thread, threads) on so many threads, or on fewer; 0 is the one that calls.
#ifdef _OPENMP
template <typename F>
void on_threads(int threads, const F& body) {
#pragma omp parallel num_threads(threads)
  body(omp_get_thread_num(), omp_get_num_threads());
}
#else
// The threads of one caller, which sleep between its calls.
class Crew {
 public:
  void run(int threads, const std::function<void(int, int)>& body) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      while (int(all_.size()) < threads - 1) all_.emplace_back(&Crew::work, this, int(all_.size()) + 1, round_);
      body_ = &body, threads_ = threads, running_ = threads - 1, ++round_;
    }
    begin_.notify_all();
    body(0, threads);
    std::unique_lock<std::mutex> lock(mutex_);
    end_.wait(lock, [&] { return running_ == 0; });
  }

  ~Crew() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      body_ = nullptr, threads_ = int(all_.size()) + 1, ++round_;
    }
    begin_.notify_all();
    for (std::thread& thread : all_) thread.join();
  }

 private:
  void work(int thread, uint64_t seen) {
    for (std::unique_lock<std::mutex> lock(mutex_);;) {
      begin_.wait(lock, [&] { return round_ != seen; });
      seen = round_;
      if (thread >= threads_) continue;
      if (!body_) return;
      lock.unlock();
      (*body_)(thread, threads_);
      lock.lock();
      if (--running_ == 0) end_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable begin_, end_;
  std::vector<std::thread> all_;
  const std::function<void(int, int)>* body_ = nullptr;  // null: the threads end
  int threads_ = 0, running_ = 0;
  uint64_t round_ = 0;
};

template <typename F>
void on_threads(int threads, const F& body) {
  thread_local Crew crew;
  crew.run(threads, body);
}
#endif

}  // namespace

void with_team(int threads, void (*body)(const void*), const void* context) noexcept {
  if (threads <= 1 || team || in_loop) return body(context);
  Team own(threads);
  on_threads(threads, [&](int thread, int count) {
    if (thread == 0) {
      team = &own;
      body(context);
      team = nullptr;
      own.close(count - 1);
    } else {
      own.help(thread);
    }
  });
}

bool team_is_open() noexcept { return team != nullptr; }

void team_for(int64_t n, int threads, void (*body)(const void*, int64_t, int64_t), const void* context) noexcept {
  const Loop loop{body, context, n};
  if (in_loop || n < 2 || n >> 32 || (!team && threads <= 1)) {
    body(context, 0, n);
  } else if (team) {
    team->run(loop);
  } else {
    with_team(
        threads,
        [](const void* it) {
          const Loop& loop = *static_cast<const Loop*>(it);
          team_for(loop.n, 1, loop.body, loop.context);
        },
        &loop);
  }
}

}  // namespace dflash
