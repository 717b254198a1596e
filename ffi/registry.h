// Heap id and device -> context. Handlers look their context up at every call, so a program that
// outlives its heap finds nothing instead of freed memory.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

namespace symmkv {

template <class Context>
class Registry {
 public:
  // False if the key is taken.
  bool Put(int64_t heap_id, int64_t device, std::shared_ptr<Context> context) {
    const std::lock_guard lock(mutex_);
    return contexts_.emplace(Key(heap_id, device), std::move(context)).second;
  }

  // The caller's reference keeps the context alive through its call.
  std::shared_ptr<Context> Find(int64_t heap_id, int64_t device) const {
    const std::lock_guard lock(mutex_);
    const auto found = contexts_.find(Key(heap_id, device));
    return found == contexts_.end() ? nullptr : found->second;
  }

  void Remove(int64_t heap_id, int64_t device) {
    const std::lock_guard lock(mutex_);
    contexts_.erase(Key(heap_id, device));
  }

 private:
  using Key = std::pair<int64_t, int64_t>;
  mutable std::mutex mutex_;
  std::map<Key, std::shared_ptr<Context>> contexts_;
};

}  // namespace symmkv
