// The ops on the CPU that are more than one kernel, or whose kernel takes lists that a contract cannot say.
// Their contracts have matched; tensors are numbered as there.
#pragma once
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "binding/contract.h"

namespace dflash {

// The products of a call's first tensor with weights side by side; false if torch's product is faster, or the
// operands do not fit each other.
inline bool read_products(const Call& call, const Seen* weights, int count, const Seen* biases, const Seen* scales,
                          LinearParams& p) {
  const DLTensor& x = call.seen[0].t;
  p.x = x.data, p.in = x.shape[x.ndim - 1], p.dtype = call.dtype(), p.rows = 1;
  for (int i = 0; i + 1 < x.ndim; ++i) p.rows *= x.shape[i];
  if (p.in == 0 || (!scales && p.rows > max_skinny_rows(p.dtype))) return false;
  for (int i = 0; i < count; ++i) {
    const DLTensor& weight = weights[i].t;
    if ((weight.dtype() == kDLInt8) != (scales != nullptr)) return false;
    if (biases && biases[i].t.shape[0] != weight.shape[0]) return false;
    p.weights[i] = weight.data, p.features[i] = weight.shape[0];
    p.biases[i] = biases ? biases[i].t.data : nullptr;
    p.scales[i] = scales ? static_cast<const float*>(scales->t.data) + p.out_features : nullptr;
    p.out_features += weight.shape[0];
  }
  p.num_weights = count;
  return true;
}

// linear(x, weight, bias, scales) and linears(x, weights, biases, scales)
inline bool run_linears(const Call& call, void* const* outputs) {
  LinearParams p{};
  p.out = outputs[0];
  if (!read_products(call, call.tensors(1), call.count[1], call.tensors(2), call.tensors(3), p)) return false;
  run_kernel(&CpuKernels::linear, p, torch.num_threads(), call.bytes);
  return true;
}

// swiglu(x, gate, up, scales)
inline bool run_swiglu(const Call& call, void* const* outputs) {
  LinearParams p{};
  if (!read_products(call, call.tensors(1), 2, nullptr, call.tensors(3), p)) return false;
  const std::unique_ptr<char[]> gate_up(new char[p.rows * p.out_features * call.seen[0].t.element_size()]);
  p.out = gate_up.get();
  run_kernel(&CpuKernels::linear, p, torch.num_threads(), call.bytes);
  SiluMulParams gated{p.out, outputs[0], p.rows, p.features[0], p.dtype, 0};
  run_kernel(&CpuKernels::silu_mul, gated, p.threads, call.bytes);
  return true;
}

// fuse_features(context, num_context, fc_weight, norm_weight), and eps as the last argument
inline bool run_fuse_features(const Call& call, void* const* outputs) {
  LinearParams p{};
  if (!read_products(call, call.tensors(2), 1, nullptr, nullptr, p)) return false;
  const std::unique_ptr<char[]> fused(new char[p.rows * p.out_features * call.seen[0].t.element_size()]);
  p.out = fused.get();
  run_kernel(&CpuKernels::linear, p, torch.num_threads(), call.bytes);
  RmsNormParams norm{};
  norm.x = p.out, norm.weight = call.tensors(3)->t.data, norm.out = outputs[0];
  norm.counts = static_cast<const int64_t*>(call.tensors(1)->t.data);
  norm.rows = p.rows, norm.rows_per_sequence = call.seen[0].t.shape[1], norm.hidden = p.out_features;
  norm.eps = float(call.number(4)), norm.dtype = p.dtype;
  run_kernel(&CpuKernels::rms_norm, norm, p.threads, call.bytes);
  return true;
}

// compact_kv_(path, counts, first, k_caches, v_caches)
inline bool run_compact_kv(const Call& call, void* const*) {
  const int count = call.count[3] + call.count[4];
  if (count == 0) return true;
  const Seen* caches = call.tensors(3);  // and those of v behind them
  std::vector<void*> addresses;
  std::vector<int64_t> heads, row_bytes;
  for (int i = 0; i < count; ++i) {
    const DLTensor& t = caches[i].t;
    addresses.push_back(t.data), heads.push_back(t.shape[1]);
    row_bytes.push_back(t.shape[3] * t.element_size());
  }
  const auto numbers = [&call](int i) { return static_cast<const int64_t*>(call.tensors(i)->t.data); };
  const int64_t* path = call.seen[0].t.shape;
  CompactKvParams p{numbers(0),     numbers(1),           numbers(2), addresses.data(),
                    {heads.data()}, {row_bytes.data()},   count,      path[0],
                    path[1],        caches[0].t.shape[2], 0};
  run_kernel(&CpuKernels::compact_kv, p, torch.num_threads(), call.bytes);
  return true;
}

// Null for an op whose kernel takes the contract's fields.
inline Body body_of(const std::string& op) {
  static const std::map<std::string, Body> bodies{{"linear", run_linears},
                                                  {"linears", run_linears},
                                                  {"swiglu", run_swiglu},
                                                  {"fuse_features", run_fuse_features},
                                                  {"compact_kv_", run_compact_kv}};
  const auto found = bodies.find(op);
  return found == bodies.end() ? nullptr : found->second;
}

}  // namespace dflash
