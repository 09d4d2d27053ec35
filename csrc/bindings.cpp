// Addresses, sizes and (for CUDA) a stream in; a kernel call out. ops.py has checked and allocated everything.
#include <pybind11/pybind11.h>

#include "cpu/table.h"
#include "params.h"

namespace py = pybind11;
using namespace dflash;

namespace {

template <typename T>
T* ptr(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

using Address = uintptr_t;

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.def("isa", [] { return cpu_kernels().isa; });

  m.def("rms_norm", [](Address x, Address residual, Address weight, Address counts, Address out, Address residual_out,
                       int64_t rows, int64_t hidden, int64_t rows_per_sequence, float eps, int dtype, int threads) {
    const RmsNormParams p{ptr<void>(x),   ptr<void>(residual),     ptr<void>(weight), ptr<int64_t>(counts),
                          ptr<void>(out), ptr<void>(residual_out), rows,              hidden,
                          rows_per_sequence, eps, DType(dtype), threads};
    py::gil_scoped_release release;
    cpu_kernels().rms_norm(p);
  });

  m.def("silu_mul", [](Address gate_up, Address out, int64_t rows, int64_t width, int dtype, int threads) {
    const SiluMulParams p{ptr<void>(gate_up), ptr<void>(out), rows, width, DType(dtype), threads};
    py::gil_scoped_release release;
    cpu_kernels().silu_mul(p);
  });
}
