#include "cpu/team.h"

#ifdef _OPENMP
#include <omp.h>
#include <time.h>

#include <condition_variable>
#include <mutex>
#endif

namespace dflash {

#ifdef _OPENMP

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

int64_t nanoseconds(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return now.tv_sec * int64_t(1000000000) + now.tv_nsec;
}

// Limits the number of threads while other programs compete for processors. A helper preempted in the middle
// of an iteration holds up the team for a time slice, which is longer than most steps of a small model, so
// one thread fewer is faster if it happens again and again. Time lost in that way is forgiven at an eighth of
// the time that passes: a machine at rest has a few such slices per second. One alone is never a reason, and
// a trial starts afresh.
// Another thread is tried after a wait, which grows after every failure and shrinks after every success.
class Throttle {
 public:
  int threads(int wanted) {
    const int64_t now = nanoseconds(CLOCK_MONOTONIC);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (most_ < kAll && now >= next_trial_) {
      ++most_;
      again_after(now, wait_ / 2);
    }
    return wanted < most_ ? wanted : most_;
  }

  // Records that a team of `threads` threads was held up for `lost` nanoseconds.
  void held_up(int threads, int64_t lost) {
    const int64_t now = nanoseconds(CLOCK_MONOTONIC);
    const std::lock_guard<std::mutex> lock(mutex_);
    const int64_t forgiven = (now - last_) / kShare;
    lost_ = (lost_ > forgiven ? lost_ - forgiven : 0) + (lost < kMost / 2 ? lost : kMost / 2);
    last_ = now;
    if (lost_ < kMost) return;
    lost_ = 0;
    if (threads - 1 < most_) most_ = threads - 1;
    again_after(now, wait_ * 4);
  }

 private:
  static constexpr int kAll = 1 << 16;
  static constexpr int64_t kShortest = 50000000, kLongest = 1000000000;
  static constexpr int64_t kMost = 10000000, kShare = 8;

  void again_after(int64_t now, int64_t wait) {
    wait_ = wait < kShortest ? kShortest : wait > kLongest ? kLongest : wait;
    next_trial_ = now + wait_;
  }

  std::mutex mutex_;
  int most_ = kAll;
  int64_t wait_ = kShortest, next_trial_ = 0;
  int64_t lost_ = 0, last_ = 0;
};

Throttle throttle;

// Where threads wait for another thread's write. They spin for a while, then sleep to free the processor for
// the other thread.
class Gate {
 public:
  // Waits until there() is true; returns the nanoseconds asleep.
  template <typename F>
  int64_t wait(const F& there) {
    int64_t since = 0;
    for (int looks = 0;; ++looks) {
      if (there()) return 0;
      if (looks % 64 == 0) {
        const int64_t now = nanoseconds(CLOCK_MONOTONIC);
        if (since == 0) since = now;
        if (now - since > kPatience) break;
      }
#if defined(__x86_64__) || defined(__i386__)
      __builtin_ia32_pause();
#elif defined(__aarch64__)
      asm volatile("yield");
#endif
    }
    since = nanoseconds(CLOCK_MONOTONIC);
    std::unique_lock<std::mutex> lock(mutex_);
    __atomic_fetch_add(&asleep_, 1, __ATOMIC_SEQ_CST);
    changed_.wait(lock, there);
    __atomic_fetch_sub(&asleep_, 1, __ATOMIC_SEQ_CST);
    return nanoseconds(CLOCK_MONOTONIC) - since;
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
  explicit Team(int threads)
      : threads_(threads),
        ranges_(threads < kMaxRanges ? threads : kMaxRanges),
        since_(nanoseconds(CLOCK_MONOTONIC)) {
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
    const int64_t busy_before = nanoseconds(CLOCK_THREAD_CPUTIME_ID);
    int64_t asleep = 0;
    for (uint64_t seen = 0, round = 0;; seen = round) {
      asleep += start_.wait([&] { return (round = get(round_)) != seen; });
      if (round == kClosed) break;
      const Loop& slot = loops_[round % 2].loop;
      const Loop loop{get(slot.body), get(slot.context), get(slot.n)};
      if (get(round_) == round) work(thread, loop, round);  // else a later round may be half written here
    }
    const int64_t busy = nanoseconds(CLOCK_THREAD_CPUTIME_ID) - busy_before;
    const int64_t life = nanoseconds(CLOCK_MONOTONIC) - since_, away = life - busy - asleep;
    if (away >= kSlice && away >= life / 8 && __atomic_fetch_add(&held_up_, 1, __ATOMIC_SEQ_CST) == 0)
      throttle.held_up(threads_, away);
    __atomic_fetch_add(&gone_, 1, __ATOMIC_SEQ_CST);
    end_.open();
  }

  // Dismisses the helpers and waits for them. OpenMP would wait too, but it spins for much longer before it
  // sleeps.
  void close(int helpers) {
    set(round_, kClosed);
    start_.open();
    end_.wait([&] { return get(gone_) == helpers; });
  }

 private:
  static constexpr uint64_t kClosed = ~uint64_t(0);
  // A helper counts as preempted after this many nanoseconds off its processor, and an eighth of its life.
  static constexpr int64_t kSlice = 1000000;

  // Progress in a range: round << 32 | iterations taken. An older round means none. One cache line each.
  struct alignas(64) Taken {
    uint64_t value;
  };

  // Takes half of the iterations left in a range of `count`, as [first, last); returns false if none are
  // left. A round cannot end before all its iterations are taken, so a successful take belongs to the current
  // round even if this thread read the loop long ago.
  static bool take(Taken& range, uint64_t round, int64_t count, int64_t& first, int64_t& last) {
    uint64_t taken = get(range.value);
    for (;;) {
      if (taken >> 32 > round) return false;
      first = taken >> 32 == round ? int64_t(taken & 0xffffffffu) : 0;
      if (first >= count) return false;
      last = first + (count - first + 1) / 2;
      if (__atomic_compare_exchange_n(&range.value, &taken, round << 32 | uint64_t(last), true,
                                      __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
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
  int gone_ = 0, held_up_ = 0;     // helpers
  Gate end_;
  alignas(64) uint64_t last_round_ = 0;
  int64_t all_ = 0;  // iterations in all rounds started
  const int threads_, ranges_;
  const int64_t since_;
  Taken ranges_taken_[kMaxRanges];
};

thread_local Team* team = nullptr;  // the team that this thread opened

}  // namespace

void with_team(int threads, void (*body)(const void*), const void* context) noexcept {
  const int used = threads > 1 ? throttle.threads(threads) : 1;
  if (used <= 1 || team || in_loop) return body(context);
  Team own(used);
#pragma omp parallel num_threads(used)
  {
    const int thread = omp_get_thread_num();
    if (thread == 0) {
      team = &own;
      body(context);
      team = nullptr;
      own.close(omp_get_num_threads() - 1);
    } else {
      own.help(thread);
    }
  }
}

void team_for(int64_t n, int threads, void (*body)(const void*, int64_t, int64_t),
              const void* context) noexcept {
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

#else

void with_team(int, void (*body)(const void*), const void* context) noexcept { body(context); }

void team_for(int64_t n, int, void (*body)(const void*, int64_t, int64_t), const void* context) noexcept {
  body(context, 0, n);
}

#endif

}  // namespace dflash
