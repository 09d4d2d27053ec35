// Runs CPU kernels for another process: reads calls from standard input, and writes a byte after each.
//
//     harness MEMORY
//
// MEMORY is a file that the caller maps too. It lies at kAt here, and addresses are those of this process.
//
// A call is the kernel's name, a line, and what the binding is given as a value: "i" or "f" and eight bytes, "n" for
// nothing, "l" and a count of values, or "d" and a count of pairs of a name, a line, and a value.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <iostream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "cpu/base/table.h"

namespace {

using namespace dflash;

void* const kAt = reinterpret_cast<void*>(0x200000000000);

struct Value {
  char kind;
  int64_t integer = 0;
  double number = 0;
  std::vector<std::pair<std::string, Value>> items;
};

template <typename T>
T read() {
  T value;
  if (!std::cin.read(reinterpret_cast<char*>(&value), sizeof(value))) std::exit(2);
  return value;
}

Value read_value() {
  Value value{};
  value.kind = read<char>();
  if (value.kind == 'i') value.integer = read<int64_t>();
  if (value.kind == 'f') value.number = read<double>();
  if (value.kind == 'l' || value.kind == 'd')
    for (int64_t i = 0, count = read<int64_t>(); i < count; ++i) {
      std::string name;
      if (value.kind == 'd') std::getline(std::cin, name);
      value.items.emplace_back(name, read_value());
    }
  return value;
}

// What params point to besides the caller's memory, until the kernel has run.
std::deque<std::vector<char>> kept;

// As store_record of binding/fields.h.
template <typename T>
void store(T& to, const Value& given) {
  using Target = std::remove_const_t<std::remove_pointer_t<T>>;
  if constexpr (std::is_array_v<T>) {
    for (size_t i = 0; i < given.items.size(); ++i) store(to[i], given.items[i].second);
  } else if constexpr (std::is_same_v<T, Sizes>) {
    store(to.values, given);
  } else if constexpr (std::is_pointer_v<T>) {
    if constexpr (!std::is_void_v<Target>)
      if (given.kind == 'l') {
        kept.emplace_back(given.items.size() * sizeof(Target));
        auto* list = reinterpret_cast<Target*>(kept.back().data());
        for (size_t i = 0; i < given.items.size(); ++i) store(list[i], given.items[i].second);
        to = list;
        return;
      }
    to = reinterpret_cast<T>(given.integer);
  } else if constexpr (std::is_class_v<T>) {
    std::string names = T::kNames;
    size_t index = 0;
    const auto one = [&](auto& field) {
      const size_t end = names.find(','), size = end == std::string::npos ? names.size() : end;
      const std::string name = names.substr(0, size);
      names.erase(0, names.find_first_not_of(", ", size));
      if (given.kind == 'd') {
        for (const auto& [key, value] : given.items)
          if (key == name && value.kind != '?') store(field, value);
      } else if (given.kind == 'l') {
        store(field, given.items.at(index).second);
      } else if (index == 0 && given.kind != 'n') {
        store(field, given);
      }
      ++index;
    };
    to.fields([&](auto&... field) { (one(field), ...); });
  } else {
    to = given.kind == 'f' ? T(given.number) : T(given.integer);
  }
}

template <typename Params>
void run(void (*kernel)(const Params&), const Value& given) {
  Params p{};
  store(p, given);
  for (const auto& [key, value] : given.items)
    if (key == "threads") p.threads = int32_t(value.integer);
  kernel(p);
  kept.clear();
}

}  // namespace

int main(int, char** arguments) {
  const int file = open(arguments[1], O_RDWR);
  struct stat status;
  fstat(file, &status);
  if (mmap(kAt, status.st_size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) != kAt) return 1;
  const CpuKernels& kernels = cpu_kernels();
  for (std::string name; std::getline(std::cin, name); std::cout.put('.').flush()) {
    const Value given = read_value();
#define RUN(kernel, Params) \
  if (name == #kernel) run(kernels.kernel, given);
    DFLASH_KERNELS(RUN, RUN, RUN)
#undef RUN
  }
}
