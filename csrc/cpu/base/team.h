// Loops over OpenMP threads. torch loads libgomp before this module, so both share one pool. On macOS, where compilers
// have no OpenMP and a process must not have a second libomp next to torch's, over threads of our own.
//
// The barrier of an OpenMP loop waits for every thread, even one that the system has put aside without work: on a busy
// machine that costs a time slice for each of a step's many short loops. Here a loop ends when its iterations have. A
// thread takes those of its own range first, then what others have left. with_team keeps one OpenMP region open over
// all loops of a call.
#pragma once
#include <cstdint>

namespace dflash {

// body(context) on this thread; up to `threads` threads in all share the loops in it.
void with_team(int threads, void (*body)(const void* context), const void* context) noexcept;

// True on a thread that has opened a team, whose other threads wait for its loops.
bool team_is_open() noexcept;

// body(context, first, last) for ranges that make up [0, n), by the team this thread has opened or else by one of
// `threads` threads.
void team_for(int64_t n, int threads, void (*body)(const void* context, int64_t first, int64_t last),
              const void* context) noexcept;

}  // namespace dflash
