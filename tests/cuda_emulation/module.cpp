// The emulated kernels as a Python module, bound as those of _C are.
#include "cuda/bindings.h"
#include "machine.h"
#include "self_test.h"

namespace py = pybind11;
using namespace dflash;

static void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

PYBIND11_MODULE(cuda_emulation, m) {
  m.def("with_cuda", [] { return true; });
  m.def("cuda_status", [](int) { return ""; });
  bind_cuda_kernels(m);

  m.def("sanitized", &emulation::sanitized);
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
    check(launch_last_block(fault, ptr<float>(in), ptr<float>(partial), ptr<unsigned>(counter),
                            ptr<float>(out), nullptr));
  });
  m.def("tensor_core", [](bool half, Address a, Address b, Address out, bool transposed) {
    check(launch_tensor_core(half, ptr<void>(a), ptr<void>(b), ptr<float>(out), transposed, nullptr));
  });
}
