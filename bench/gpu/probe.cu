// What launches that overlap are worth on this GPU, in half a minute: nvcc -std=c++17 -O3 -arch=native -o
// probe probe.cu && ./probe
//   1. Bandwidth of reads and of a copy, on random data: the ceiling of a step, which only reads.
//   2. A chain of empty kernels in a graph, without and with overlap: what a launch costs.
//   3. Three kernels shaped like the o projection, a norm and the gate/up projection: when do the blocks of
//   the second
//      and the third start, measured from the end of the first?
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

static void check(cudaError_t error, const char* what, int line) {
  if (error == cudaSuccess) return;
  std::printf("probe.cu:%d %s: %s\n", line, what, cudaGetErrorString(error));
  std::exit(1);
}
#define CHECK(call) check(call, #call, __LINE__)

static cudaStream_t stream;

template <typename... Parameters, typename... Arguments>
static void launch(bool overlapping, void (*kernel)(Parameters...), int grid, int block, size_t shared,
                   Arguments... arguments) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(grid));
  config.blockDim = dim3(unsigned(block));
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = overlapping ? 1 : 0;
  CHECK(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...));
}

// Milliseconds of a call, the last of three, so that clocks are up.
template <typename Call>
static float milliseconds(Call call) {
  cudaEvent_t began, ended;
  CHECK(cudaEventCreate(&began));
  CHECK(cudaEventCreate(&ended));
  float took = 0;
  for (int i = 0; i < 3; ++i) {
    CHECK(cudaEventRecord(began, stream));
    call();
    CHECK(cudaEventRecord(ended, stream));
    CHECK(cudaEventSynchronize(ended));
    CHECK(cudaEventElapsedTime(&took, began, ended));
  }
  CHECK(cudaEventDestroy(began));
  CHECK(cudaEventDestroy(ended));
  return took;
}

struct Graph {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t runs = nullptr;

  template <typename Calls>
  explicit Graph(Calls calls) {
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    calls();
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&runs, graph, 0));
  }
  ~Graph() {
    cudaGraphExecDestroy(runs);
    cudaGraphDestroy(graph);
  }
  void replay() const { CHECK(cudaGraphLaunch(runs, stream)); }

  // Edges that let the second kernel start early, of how many.
  std::pair<size_t, size_t> programmatic_edges() const {
    size_t all = 0;
    CHECK(cudaGraphGetEdges(graph, nullptr, nullptr, nullptr, &all));
    std::vector<cudaGraphNode_t> from(all), to(all);
    std::vector<cudaGraphEdgeData> data(all);
    CHECK(cudaGraphGetEdges(graph, from.data(), to.data(), data.data(), &all));
    const auto is_programmatic = [](const cudaGraphEdgeData& d) {
      return d.type == cudaGraphDependencyTypeProgrammatic;
    };
    return {size_t(std::count_if(data.begin(), data.end(), is_programmatic)), all};
  }
};

// ---- 1. bandwidth

static __global__ void fill(uint4* to, size_t count) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x) {
    uint32_t word[4], x = (uint32_t(i) ^ uint32_t(i >> 32)) * 2654435761u + 1;
    for (uint32_t& w : word) {
      x ^= x << 13, x ^= x >> 17, x ^= x << 5;
      w = x;
    }
    to[i] = make_uint4(word[0], word[1], word[2], word[3]);
  }
}

static __global__ void __launch_bounds__(512) read_all(const uint4* from, size_t count, uint32_t* out) {
  constexpr int kAtOnce = 8;
  const size_t step = size_t(gridDim.x) * blockDim.x;
  uint32_t sum = 0;
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count; i += kAtOnce * step) {
    uint4 words[kAtOnce] = {};
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k)
      if (i + k * step < count) words[k] = __ldcs(from + i + k * step);
#pragma unroll
    for (const uint4& w : words) sum ^= w.x ^ w.y ^ w.z ^ w.w;
  }
  if (sum == 0x12345678u) *out = sum;  // so that nothing above can be left out
}

static void bandwidth(int multiprocessors) {
  const size_t bytes = size_t(4) << 30;
  uint4 *from, *to;
  uint32_t* out;
  CHECK(cudaMalloc(&from, bytes));
  CHECK(cudaMalloc(&to, bytes));
  CHECK(cudaMalloc(&out, sizeof *out));
  launch(false, fill, 4096, 256, 0, from, bytes / 16);
  for (int per : {1, 2, 4, 16}) {
    const int grid = per * multiprocessors;
    const float took = milliseconds([&] {
      for (int i = 0; i < 5; ++i) launch(false, read_all, grid, 512, 0, from, bytes / 16, out);
    });
    std::printf("read, %5d blocks         %6.3f TB/s\n", grid, 5 * double(bytes) / took / 1e9);
  }
  const float took = milliseconds([&] {
    for (int i = 0; i < 5; ++i) CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream));
  });
  std::printf("copy, read and written    %6.3f TB/s\n", 10 * double(bytes) / took / 1e9);
  CHECK(cudaFree(from));
  CHECK(cudaFree(to));
  CHECK(cudaFree(out));
}

// ---- 2. launches

static __global__ void empty() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

static void launches() {
  constexpr int kKernels = 400, kReplays = 10;
  for (bool overlapping : {false, true}) {
    const Graph graph([&] {
      for (int i = 0; i < kKernels; ++i) launch(overlapping, empty, 16, 512, 0);
    });
    const float took = milliseconds([&] {
      for (int i = 0; i < kReplays; ++i) graph.replay();
    });
    const auto [programmatic, all] = graph.programmatic_edges();
    std::printf("empty kernels, overlap %-3s %6.2f us each; %zu of %zu edges programmatic\n",
                overlapping ? "on" : "off", 1000 * took / (kKernels * kReplays), programmatic, all);
  }
}

// ---- 3. three kernels of a layer

struct Times {  // nanoseconds of %globaltimer
  unsigned long long first_start = ~0ull, last_start = 0, first_waited = ~0ull, end = 0;
};

static __device__ unsigned long long now() {
  unsigned long long time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
}

// Runs for so many nanoseconds after its wait.
template <int kThreads>
static __global__ void __launch_bounds__(kThreads, 1) busy(Times* times, int nanoseconds, bool trigger_first) {
  if (threadIdx.x == 0) {
    const auto start = now();
    atomicMin(&times->first_start, start);
    atomicMax(&times->last_start, start);
  }
  if (trigger_first) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (!trigger_first) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  const auto waited = now();
  while (now() < waited + nanoseconds) {
  }
  if (threadIdx.x == 0) {
    atomicMin(&times->first_waited, waited);
    atomicMax(&times->end, now());
  }
}

template <int kThreads>
static void prepare(int carveout) {
  CHECK(cudaFuncSetAttribute(busy<kThreads>, cudaFuncAttributeMaxDynamicSharedMemorySize, 93 * 1024));
  CHECK(cudaFuncSetAttribute(busy<kThreads>, cudaFuncAttributePreferredSharedMemoryCarveout, carveout));
}

static void layer(Times* times, bool trigger_first, int shared, int threads, int carveout) {
  const Graph graph([&] {
    launch(false, busy<256>, 256, 256, size_t(shared), times, 20000, trigger_first);
    if (threads == 512)
      launch(true, busy<512>, 16, 512, 128, times + 1, 1000, trigger_first);
    else
      launch(true, busy<64>, 16, 64, 128, times + 1, 1000, trigger_first);
    launch(true, busy<256>, 192, 256, size_t(shared), times + 2, 5000, trigger_first);
  });
  Times found[3];
  for (int i = 0; i < 3; ++i) {
    for (Times& t : found) t = Times();
    CHECK(cudaMemcpyAsync(times, found, sizeof found, cudaMemcpyHostToDevice, stream));
    graph.replay();
    CHECK(cudaMemcpyAsync(found, times, sizeof found, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamSynchronize(stream));
  }
  const auto us = [&](unsigned long long time) { return (double(time) - double(found[0].end)) / 1000; };
  std::printf(
      "trigger %-6s the wait, products of %5d B, a norm of %3d threads, carveout %3d: norm starts %6.2f to "
      "%6.2f, "
      "runs %5.2f to %5.2f; next product starts %6.2f to %6.2f, runs from %5.2f us\n",
      trigger_first ? "before" : "after", shared, threads, carveout, us(found[1].first_start), us(found[1].last_start),
      us(found[1].first_waited), us(found[1].end), us(found[2].first_start), us(found[2].last_start),
      us(found[2].first_waited));
}

int main() {
  cudaDeviceProp device;
  CHECK(cudaGetDeviceProperties(&device, 0));
  std::printf("%s, compute capability %d.%d, %d multiprocessors, L2 %d MB, %d KB of shared memory each\n", device.name,
              device.major, device.minor, device.multiProcessorCount, device.l2CacheSize >> 20,
              int(device.sharedMemPerMultiprocessor >> 10));
  CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  bandwidth(device.multiProcessorCount);
  launches();
  Times* times;
  CHECK(cudaMalloc(&times, 3 * sizeof *times));
  for (int carveout : {-1, 100}) {  // the driver's choice, and as much shared memory as there is
    prepare<64>(carveout);
    prepare<256>(carveout);
    prepare<512>(carveout);
    for (bool trigger_first : {true, false})
      for (int shared : {92160, 73728})  // five stages of a product, and four
        for (int threads : {64, 512}) layer(times, trigger_first, shared, threads, carveout);
  }
  CHECK(cudaDeviceSynchronize());
}
