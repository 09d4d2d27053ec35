#include "shadow.h"

#include <algorithm>

namespace emulation {

static void merge(std::vector<Time>& into, const std::vector<Time>& from) {
  if (into.size() < from.size()) into.resize(from.size(), 0);
  for (size_t i = 0; i < from.size(); ++i) into[i] = std::max(into[i], from[i]);
}

static void merge(Knowledge& into, const Knowledge& from) {
  for (const auto& [block, times] : from) merge(into[block], times);
}

static bool knows(const Knowledge& knowledge, int64_t block, size_t thread, Time time) {
  const auto known = knowledge.find(block);
  return known != knowledge.end() && thread < known->second.size() && known->second[thread] > time;
}

void Shadow::reset() { *this = Shadow(); }

void Shadow::start(int launch) {
  if (oldest_.size() > size_t(launch)) return;
  if (released_early_.size() <= size_t(launch)) released_early_.resize(launch + 1, false);
  // If the kernel ahead let this one start before its own wait, those ahead of that one may still run too.
  oldest_.push_back(launch == 0 ? now_ + 1 : released_early_[launch - 1] ? oldest_[launch - 1] : begun_[launch - 1]);
}

void Shadow::begin(int launch) {
  start(launch);
  published_.clear();  // knowledge is of blocks of one grid
  begun_.push_back(++now_);
}

void Shadow::released_early(int launch) {
  if (released_early_.size() <= size_t(launch)) released_early_.resize(launch + 1, false);
  released_early_[launch] = true;
}

void Shadow::fence(BlockView& block, ThreadView& thread) {
  thread.fenced = ++now_;
  thread.covered = block.barrier;
  merge(thread.acquired, thread.observed);
  merge(thread.acquired, block.observed);
}

void Shadow::barrier(BlockView& block, const std::vector<ThreadView*>& threads) {
  block.barrier = ++now_;
  block.fenced.resize(threads.size(), 0);
  for (size_t i = 0; i < threads.size(); ++i) {
    ThreadView& thread = *threads[i];
    block.fenced[i] = std::max(block.fenced[i], thread.fenced);
    block.covered = std::max(block.covered, thread.covered);
    merge(block.observed, thread.observed);
    merge(block.acquired, thread.acquired);
    thread.observed.clear();
    thread.acquired.clear();
  }
}

void Shadow::atomic(const void* address, int64_t number, BlockView& block, int index, ThreadView& thread) {
  ++now_;
  std::vector<Time> visible(std::max(block.fenced.size(), size_t(index) + 1), std::max(block.covered, thread.covered));
  merge(visible, block.fenced);
  visible[index] = std::max(visible[index], thread.fenced);
  Knowledge& published = published_[address];
  merge(published[number], visible);
  merge(published, thread.acquired);
  merge(published, block.acquired);
  merge(thread.observed, published);
}

Shadow::Page* Shadow::find(uintptr_t page) {
  if (last_ && last_page_ == page) return last_;
  const auto found = pages_.find(page);
  if (found == pages_.end()) return nullptr;
  last_page_ = page;
  return last_ = &found->second;
}

Shadow::Page& Shadow::make(uintptr_t page) {
  if (Page* found = find(page)) return *found;
  last_page_ = page;
  last_ = &pages_.emplace(page, Page(kPage, Byte{})).first->second;  // nodes stay where they are
  return *last_;
}

Shadow::Byte* Shadow::find_byte(const char* address) {
  const uintptr_t at = reinterpret_cast<uintptr_t>(address);
  Page* page = find(at / kPage);
  return page ? &(*page)[at % kPage] : nullptr;
}

std::string Shadow::store(const char* address, size_t bytes, int launch, int64_t number, int thread) {
  for (size_t i = 0; i < bytes; ++i) {
    const uintptr_t at = reinterpret_cast<uintptr_t>(address + i);
    Byte& byte = make(at / kPage)[at % kPage];
    if (byte.early > uint32_t(launch) + 1)
      return "stores what overlapping launch +" + std::to_string(byte.early - 1 - launch) + " has read before its wait";
    byte.store.time = uint32_t(now_);
    byte.store.launch = uint32_t(launch) & 4095;
    byte.store.thread = uint32_t(thread) & 1023;
    byte.store.block = uint32_t(number);
  }
  return "";
}

std::string Shadow::load(const char* address, size_t bytes, int launch, int64_t number, const BlockView& block,
                         const ThreadView& view) {
  for (size_t i = 0; i < bytes; ++i) {
    const Byte* byte = find_byte(address + i);
    if (!byte || !byte->store.time || int(byte->store.launch) != launch || byte->store.block == number) continue;
    const Store& store = byte->store;
    if (!knows(view.acquired, store.block, store.thread, store.time) &&
        !knows(block.acquired, store.block, store.thread, store.time))
      return "reads what thread " + std::to_string(store.thread) + " of block " + std::to_string(store.block) +
             " has stored: no fence, atomic and fence stand between";
  }
  return "";
}

std::string Shadow::load_before_wait(const char* address, size_t bytes, int launch) {
  for (size_t i = 0; i < bytes; ++i) {
    const uintptr_t at = reinterpret_cast<uintptr_t>(address + i);
    Byte& byte = make(at / kPage)[at % kPage];
    if (byte.store.time >= oldest_[launch])
      return "reads before its wait what launch -" + std::to_string(launch - int(byte.store.launch)) +
             ", which may still run, stores";
    byte.early = std::max(byte.early, uint32_t(launch) + 1);
  }
  return "";
}

}  // namespace emulation
