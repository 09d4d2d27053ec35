// The emulated kernels as a Python module, bound as those of _C are.
#include <dlfcn.h>

#include <map>
#include <memory>

#include "binding/cuda.h"
#include "machine.h"
#include "ptx.h"
#include "self_test.h"

namespace py = pybind11;
using namespace dflash;

static uintptr_t offset_in_library(const void* kernel) {
  Dl_info library{};
  dladdr(kernel, &library);
  return uintptr_t(kernel) - uintptr_t(library.dli_fbase);
}

// Kernels run the programs that find(offset of the kernel in this library) gives, each asked for once.
static void use_ptx(py::function find) {
  using emulation::ptx::Program;
  auto known = std::make_shared<std::map<const void*, std::shared_ptr<const Program>>>();
  const auto* kept = new py::function(find);  // until the process ends
  emulation::ptx::use([=](const void* kernel) {
    std::shared_ptr<const Program>& program = (*known)[kernel];
    if (program) return program;
    const py::gil_scoped_acquire gil;
    using Line = std::tuple<std::string, int, bool, std::vector<std::tuple<int, int, int64_t>>>;
    const py::tuple read = (*kept)(offset_in_library(kernel));
    const std::string slots = read[1].cast<std::string>();
    Program made{read[0].cast<size_t>(),
                 {slots.begin(), slots.end()},
                 read[2].cast<std::vector<std::pair<int, std::string>>>(),
                 {}};
    for (const py::handle line : read[3]) {
      const auto [opcode, guard, negated, operands] = line.cast<Line>();
      std::vector<emulation::ptx::Operand> all;
      for (const auto& [slot, width, extra] : operands) all.push_back({slot, width, extra});
      made.steps.push_back(emulation::ptx::compile({opcode, guard, negated, all}));
    }
    return program = std::make_shared<const Program>(std::move(made));
  });
}

static void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

PYBIND11_MODULE(cuda_emulation, m) {
  m.def("with_cuda", [] { return true; });
  bind_cuda_kernels(m);

  m.def("sanitized", &emulation::sanitized);
  m.def("watched", &emulation::watched);
  m.def("ignore_fences", &emulation::ignore_fences);
  m.def("use_ptx", &use_ptx);
  m.def("record", &emulation::record);
  m.def("recorded",
        [] {  // (the kernel's offset in this library, grid, threads, dynamic shared memory, overlaps)
          std::vector<std::tuple<uintptr_t, std::array<unsigned, 3>, unsigned, size_t, bool>> found;
          for (const emulation::Record& r : emulation::recorded()) {
            found.push_back(
                {offset_in_library(r.kernel), {r.grid[0], r.grid[1], r.grid[2]}, r.threads, r.shared, r.overlaps});
          }
          return found;
        });
  m.def("seed", &emulation::seed);
  m.def("synchronize", [] {
    std::string error;
    {
      py::gil_scoped_release release;
      error = emulation::synchronize();
    }
    if (!error.empty()) throw std::runtime_error("emulation: " + error);
  });
  m.def("self_test", [](const std::string& name, bool fault, Address in, Address out) {
    check(launch_self_test(name, fault, ptr<float>(in), ptr<float>(out), nullptr));
  });
  m.def("last_block", [](bool fault, Address in, Address partial, Address counter, Address out) {
    check(launch_last_block(fault, ptr<float>(in), ptr<float>(partial), ptr<unsigned>(counter), ptr<float>(out),
                            nullptr));
  });
  m.def("tensor_core", [](bool half, Address a, Address b, Address out, bool transposed) {
    check(launch_tensor_core(half, ptr<void>(a), ptr<void>(b), ptr<float>(out), transposed, nullptr));
  });
}
