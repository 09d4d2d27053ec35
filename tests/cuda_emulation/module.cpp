// The emulated kernels as a Python module, bound as those of _C are.
#include <dlfcn.h>

#include "binding/cuda.h"
#include "machine.h"
#include "self_test.h"

namespace py = pybind11;
using namespace dflash;

static void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

PYBIND11_MODULE(cuda_emulation, m) {
  m.def("with_cuda", [] { return true; });
  bind_cuda_kernels(m);

  m.def("sanitized", &emulation::sanitized);
  m.def("watched", &emulation::watched);
  m.def("ignore_fences", &emulation::ignore_fences);
  m.def("record", &emulation::record);
  m.def("recorded",
        [] {  // (the kernel's offset in this library, grid, threads, dynamic shared memory, overlaps)
          std::vector<std::tuple<uintptr_t, std::array<unsigned, 3>, unsigned, size_t, bool>> found;
          for (const emulation::Record& r : emulation::recorded()) {
            Dl_info library{};
            dladdr(r.kernel, &library);
            const uintptr_t offset = uintptr_t(r.kernel) - uintptr_t(library.dli_fbase);
            found.push_back({offset, {r.grid[0], r.grid[1], r.grid[2]}, r.threads, r.shared, r.overlaps});
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
