// The PTX that nvcc makes of a kernel, executed by the emulation in place of what g++ makes of it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cuda_emulation.h"

namespace emulation::ptx {

// Registers, constants and special registers are all slots: places in one piece of memory that each thread has.
struct Operand {
  int slot;       // its first byte
  int width;      // bytes of it
  int64_t extra;  // of an address, what is added; of a label, the number of the instruction; 1: "not" this predicate
};

// An instruction as ptx.py reads it. Vectors are operands one after the other.
struct Line {
  std::string opcode;
  int guard;  // the slot of the predicate, or -1
  bool negated;
  std::vector<Operand> operands;
};

class Thread;  // one that runs

// A kernel.
struct Program {
  struct Step {
    int guard;
    bool negated;
    std::function<void(Thread&)> run;
  };
  size_t static_shared;                            // bytes, ahead of the dynamic ones
  std::vector<unsigned char> slots;                // as each thread begins: constants, and poison in the registers
  std::vector<std::pair<int, std::string>> named;  // slots of special registers, and of parameters by their offsets
  std::vector<Step> steps;
};

// Raises std::invalid_argument for an instruction that is not known.
Program::Step compile(const Line& line);

// Runs a program as the current thread, with the kernel's parameters as CUDA lays them out.
void run(const Program& program, const Parameters& parameters);

// While set, a launch runs the program that this returns for its kernel, or its kernel where it returns none.
using Find = std::function<std::shared_ptr<const Program>(const void* kernel)>;
void use(Find programs);
std::shared_ptr<const Program> find(const void* kernel);

}  // namespace emulation::ptx
