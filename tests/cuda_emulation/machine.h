// What the Python module of the emulation asks of the machine.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace emulation {

// The order of threads and blocks, and the poison, follow from this number.
void seed(uint64_t value);

bool sanitized();
// True if the kernels tell of every access to memory.
bool watched();
// While on, fences order nothing, as if kernels had none: what needs them must then fail.
void ignore_fences(bool ignored);

// Runs what is queued; returns what went wrong, empty if nothing did.
std::string synchronize();

// A launch that was asked for.
struct Record {
  const void* kernel;
  unsigned grid[3];
  unsigned threads;
  size_t shared;
  bool overlaps;
};
// While on, launches are recorded instead of queued.
void record(bool on);
// What was recorded since it was asked for last.
std::vector<Record> recorded();

}  // namespace emulation
