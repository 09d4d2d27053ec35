// What the Python module of the emulation asks of the machine.
#pragma once
#include <cstdint>
#include <string>

namespace emulation {

// The order of threads and blocks, and the poison, follow from this number.
void seed(uint64_t value);

bool sanitized();

// Runs what is queued; returns what went wrong, empty if nothing did.
std::string synchronize();

}  // namespace emulation
